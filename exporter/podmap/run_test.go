package podmap

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	pods "k8s.io/kubelet/pkg/apis/pods/v1alpha1"
)

// kubelet is a fake of the two interfaces, on real sockets.
type kubelet struct {
	podresources.UnimplementedPodResourcesListerServer
	pods.UnimplementedPodsServer
	dir     string
	servers []*grpc.Server
	asked   atomic.Int64
	stuck   atomic.Bool // List does not answer
	limited atomic.Bool

	mu       sync.Mutex // guards what follows
	pods     []*corev1.Pod
	holders  map[string][]string // by pod name
	watchers map[chan *pods.WatchPodsEvent]struct{}
}

func startKubelet(t *testing.T, dir string, podsAPI bool) *kubelet {
	t.Helper()
	k := &kubelet{dir: dir, holders: map[string][]string{}, watchers: map[chan *pods.WatchPodsEvent]struct{}{}}
	k.serve(t, "pod-resources/kubelet.sock", func(s *grpc.Server) { podresources.RegisterPodResourcesListerServer(s, k) })
	if podsAPI {
		k.serve(t, "pods-api/pods-api.sock", func(s *grpc.Server) { pods.RegisterPodsServer(s, k) })
	}
	return k
}

func (k *kubelet) serve(t *testing.T, socket string, register func(*grpc.Server)) {
	t.Helper()
	socket = filepath.Join(k.dir, socket)
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		t.Fatal(err)
	}
	os.Remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	register(s)
	k.servers = append(k.servers, s)
	go s.Serve(l)
	t.Cleanup(s.Stop)
}

func (k *kubelet) stop() {
	for _, s := range k.servers {
		s.Stop()
	}
}

func (k *kubelet) List(ctx context.Context, _ *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.asked.Add(1)
	if k.stuck.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if k.limited.Load() {
		return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	var r podresources.ListPodResourcesResponse
	for _, p := range k.pods {
		r.PodResources = append(r.PodResources, &podresources.PodResources{Namespace: p.Namespace, Name: p.Name, Containers: []*podresources.ContainerResources{{
			Name: "main", Devices: []*podresources.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: k.holders[p.Name]}}}}})
	}
	return &r, nil
}

func (k *kubelet) WatchPods(_ *pods.WatchPodsRequest, stream grpc.ServerStreamingServer[pods.WatchPodsEvent]) error {
	events := make(chan *pods.WatchPodsEvent, 100)
	k.mu.Lock()
	for _, p := range k.pods {
		events <- event(pods.EventType_ADDED, p)
	}
	events <- &pods.WatchPodsEvent{Type: pods.EventType_INITIAL_SYNC_COMPLETE}
	k.watchers[events] = struct{}{}
	k.mu.Unlock()
	for {
		select {
		case <-stream.Context().Done():
			k.mu.Lock()
			delete(k.watchers, events)
			k.mu.Unlock()
			return nil
		case e := <-events:
			if err := stream.Send(e); err != nil {
				return err
			}
		}
	}
}

func event(kind pods.EventType, p *corev1.Pod) *pods.WatchPodsEvent {
	b, err := p.Marshal()
	if err != nil {
		panic(err)
	}
	return &pods.WatchPodsEvent{Type: kind, Pod: b}
}

// run starts a pod that holds devices.
func (k *kubelet) run(name, uid string, devices ...string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, UID: types.UID(uid)}, Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1"}}
	k.pods = append(k.pods, p)
	k.holders[name] = devices
	for w := range k.watchers {
		w <- event(pods.EventType_ADDED, p)
	}
}

func (k *kubelet) end(uid string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, p := range k.pods {
		if string(p.UID) == uid {
			k.pods = append(k.pods[:i:i], k.pods[i+1:]...)
			for w := range k.watchers {
				w <- event(pods.EventType_DELETED, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: p.Name, UID: p.UID}})
			}
			return
		}
	}
}

// follow runs the driver, and returns what waits until its newest mapping is as wanted.
func follow(t *testing.T, dir string) func(what string, want func(Mapping) bool) Mapping {
	t.Helper()
	published := make(chan Mapping, 10_000)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- Run(ctx, Config{KubeletDir: dir, Interval: 10 * time.Millisecond, MaxAge: time.Minute,
			Publish: func(m Mapping) { published <- m }, Logger: slog.New(slog.DiscardHandler)})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return func(what string, want func(Mapping) bool) Mapping {
		t.Helper()
		deadline := time.After(15 * time.Second)
		var last Mapping
		for {
			select {
			case last = <-published:
				if want(last) {
					return last
				}
			case <-deadline:
				t.Fatalf("never came: %s; last %+v", what, last)
			}
		}
	}
}

func holds(uids ...string) func(Mapping) bool {
	return func(m Mapping) bool {
		var got []string
		for _, a := range m.Allocations {
			got = append(got, a.UUID+"="+a.PodUID)
		}
		return cmp.Equal(uids, got)
	}
}

func TestRun(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir, true)
	k.run("web-0", "u0", "GPU-1")
	k.run("idle", "u1")
	until := follow(t, dir)
	m := until("the first mapping", holds("GPU-1=u0"))
	if !m.Resources.Up || !m.PodsAPI.Up || len(m.Pods) != 2 || m.Pods[1].IP != "10.0.0.1" {
		t.Errorf("mapping %+v", m)
	}
	k.end("u0")
	until("the pod is gone", holds())
	k.run("web-0", "u2", "GPU-1", "GPU-2")
	until("its successor", holds("GPU-1=u2", "GPU-2=u2"))

	k.limited.Store(true)
	m = until("refused", func(m Mapping) bool { return !m.Resources.Up })
	if !holds("GPU-1=u2", "GPU-2=u2")(m) || m.Errors[ReasonRateLimited] == 0 || !strings.Contains(m.Resources.Problem, "too many clients") {
		t.Errorf("refused by the rate limit: %+v", m)
	}
	k.limited.Store(false)
	until("answers again", func(m Mapping) bool { return m.Resources.Up })

	// The kubelet restarts: new sockets in the same folders. What was held stands meanwhile.
	k.stop()
	m = until("the kubelet is away", func(m Mapping) bool { return !m.Resources.Up && !m.PodsAPI.Up })
	if !holds("GPU-1=u2", "GPU-2=u2")(m) {
		t.Errorf("the kubelet is away: %+v", m)
	}
	k = startKubelet(t, dir, true)
	k.run("web-0", "u3", "GPU-2")
	until("the new kubelet", holds("GPU-2=u3"))
}

func TestRunWithoutPodsAPI(t *testing.T) {
	dir := t.TempDir()
	startKubelet(t, dir, false).run("web-0", "u0", "GPU-1")
	m := follow(t, dir)("the Pods API is missed", func(m Mapping) bool { return m.Resources.Up && m.Errors[ReasonUnreachable] > 0 })
	if len(m.Allocations) != 0 || !strings.Contains(m.PodsAPI.Problem, "feature gate PodsAPI") {
		t.Errorf("without the Pods API: %+v", m)
	}
}

func TestRunWithoutKubelet(t *testing.T) {
	m := follow(t, t.TempDir())("nobody answers", func(m Mapping) bool { return m.Errors[ReasonUnreachable] > 1 })
	if m.Resources.Up || m.PodsAPI.Up || m.Resources.Problem == "" {
		t.Errorf("without a kubelet: %+v", m)
	}
}

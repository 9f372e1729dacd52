package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	pods "k8s.io/kubelet/pkg/apis/pods/v1alpha1"
)

// kubelet is the part of a kubelet that the exporter asks, on real sockets below dir.
type kubelet struct {
	podresources.UnimplementedPodResourcesListerServer
	pods.UnimplementedPodsServer
	dir string

	mu       sync.Mutex // guards what follows
	born     int        // pods ever
	pods     []*corev1.Pod
	devices  [][]string // of the pod of the same place
	watchers map[chan *pods.WatchPodsEvent]struct{}
}

// serveKubelet starts one whose pods hold these devices, one list a pod.
func serveKubelet(dir string, devices [][]string) (*kubelet, error) {
	k := &kubelet{dir: dir, devices: devices, watchers: map[chan *pods.WatchPodsEvent]struct{}{}}
	for i := range devices {
		k.pods = append(k.pods, k.birth(i))
	}
	for socket, register := range map[string]func(*grpc.Server){
		"pod-resources/kubelet.sock": func(s *grpc.Server) { podresources.RegisterPodResourcesListerServer(s, k) },
		"pods-api/pods-api.sock":     func(s *grpc.Server) { pods.RegisterPodsServer(s, k) },
	} {
		path := filepath.Join(dir, socket)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		l, err := net.Listen("unix", path)
		if err != nil {
			return nil, err
		}
		s := grpc.NewServer()
		register(s)
		go s.Serve(l)
	}
	return k, nil
}

// birth makes the next incarnation of the pod at place i, of a pod's usual size.
func (k *kubelet) birth(i int) *corev1.Pod {
	k.born++
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "train", Name: fmt.Sprintf("worker-%d", i), UID: types.UID(fmt.Sprintf("6f1c0000-0000-4000-8000-%012d", k.born)),
			Labels: map[string]string{"app": "worker", "statefulset.kubernetes.io/pod-name": fmt.Sprintf("worker-%d", i)}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250)},
	}
	for c := range 3 {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: fmt.Sprint("c", c), Image: "registry.example/some/image:v1",
			Env: []corev1.EnvVar{{Name: "A_NAME", Value: "a value of usual length"}, {Name: "ANOTHER", Value: "x"}}})
		p.Status.ContainerStatuses = append(p.Status.ContainerStatuses, corev1.ContainerStatus{Name: fmt.Sprint("c", c), Ready: true, ImageID: "sha256:0123456789abcdef"})
	}
	return p
}

// replace ends a pod and gives its devices to the next of its name.
func (k *kubelet) replace(i int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.pods[i]
	k.pods[i] = k.birth(i)
	k.tell(pods.EventType_DELETED, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: old.Namespace, Name: old.Name, UID: old.UID}})
	k.tell(pods.EventType_ADDED, k.pods[i])
}

func (k *kubelet) tell(kind pods.EventType, p *corev1.Pod) {
	b, err := p.Marshal()
	if err != nil {
		panic(err) // a pod made above
	}
	for w := range k.watchers {
		select {
		case w <- &pods.WatchPodsEvent{Type: kind, Pod: b}:
		default: // as the real one: a slow client is dropped
			delete(k.watchers, w)
			close(w)
		}
	}
}

// List answers as pod-resources v1.
func (k *kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var r podresources.ListPodResourcesResponse
	for i, p := range k.pods {
		container := &podresources.ContainerResources{Name: "c0"}
		if len(k.devices[i]) > 0 {
			container.Devices = []*podresources.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: k.devices[i]}}
		}
		r.PodResources = append(r.PodResources, &podresources.PodResources{Namespace: p.Namespace, Name: p.Name, Containers: []*podresources.ContainerResources{container}})
	}
	return &r, nil
}

// WatchPods answers as the Pods API.
func (k *kubelet) WatchPods(_ *pods.WatchPodsRequest, stream grpc.ServerStreamingServer[pods.WatchPodsEvent]) error {
	events := make(chan *pods.WatchPodsEvent, 1000)
	k.mu.Lock()
	k.watchers[events] = struct{}{}
	var first []*pods.WatchPodsEvent
	for _, p := range k.pods {
		b, err := p.Marshal()
		if err != nil {
			panic(err) // a pod made above
		}
		first = append(first, &pods.WatchPodsEvent{Type: pods.EventType_ADDED, Pod: b})
	}
	k.mu.Unlock()
	for _, e := range append(first, &pods.WatchPodsEvent{Type: pods.EventType_INITIAL_SYNC_COMPLETE}) {
		if err := stream.Send(e); err != nil {
			return err
		}
	}
	for {
		select {
		case <-stream.Context().Done():
			k.mu.Lock()
			delete(k.watchers, events)
			k.mu.Unlock()
			return nil
		case e, ok := <-events:
			if !ok {
				return fmt.Errorf("too slow")
			}
			if err := stream.Send(e); err != nil {
				return err
			}
		}
	}
}

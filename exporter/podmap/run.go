package podmap

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	pods "k8s.io/kubelet/pkg/apis/pods/v1alpha1"
)

// Config is what [Run] needs.
type Config struct {
	// KubeletDir holds pod-resources/kubelet.sock and pods-api/pods-api.sock. Mount these two *directories* into a container,
	// not the sockets: a kubelet that restarts makes new ones.
	KubeletDir string
	Interval   time.Duration         // between two calls of pod-resources
	MaxAge     time.Duration         // of the newest good answer, before the mapping is dropped
	HAMi       bool                  // believe what HAMi writes into AnnotationHAMi
	Labels     []string              // keys of the pod labels that are kept
	Asked      func(began time.Time) // called before every call of pod-resources; may be nil
	Answered   func(ended time.Time) // called after every call, good or bad; may be nil
	Publish    func(Mapping)         // called with every new mapping, never twice at once
	Logger     *slog.Logger
}

const (
	callTimeout = 5 * time.Second
	// resync is how long one watch is trusted: the kubelet may drop an event when it is busy, and says so only in its log.
	resync = 5 * time.Minute
	// maxMessage bounds an answer; 4.75 MB was seen on a dense node (dcgm-exporter#509).
	maxMessage = 32 << 20
)

// Run follows the kubelet until ctx is done, and returns nil then. It blocks; a kubelet that is not there is no error.
func Run(ctx context.Context, cfg Config) error {
	resourcesConn, err := dial(filepath.Join(cfg.KubeletDir, "pod-resources", "kubelet.sock"))
	if err != nil {
		return err
	}
	defer resourcesConn.Close()
	podsConn, err := dial(filepath.Join(cfg.KubeletDir, "pods-api", "pods-api.sock"))
	if err != nil {
		return err
	}
	defer podsConn.Close()

	d := &driver{cfg: cfg, core: newCore(cfg.MaxAge, cfg.HAMi), synced: make(chan struct{}, 1)}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { d.follow(ctx, pods.NewPodsClient(podsConn)); return nil })
	group.Go(func() error { d.poll(ctx, podresources.NewPodResourcesListerClient(resourcesConn)); return nil })
	return group.Wait()
}

// dial makes one lazy connection that comes back by itself, also to a socket made anew.
func dial(socket string) (*grpc.ClientConn, error) {
	abs, err := filepath.Abs(socket)
	if err != nil {
		return nil, fmt.Errorf("kubelet socket %s: %w", socket, err)
	}
	conn, err := grpc.NewClient("unix://"+abs,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // a socket that only root can open
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 500 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithReadBufferSize(8<<10), grpc.WithWriteBufferSize(4<<10),
		grpc.WithDisableServiceConfig(), grpc.WithNoProxy())
	if err != nil {
		return nil, fmt.Errorf("kubelet socket %s: %w", abs, err)
	}
	return conn, nil
}

// driver feeds the core from two goroutines.
type driver struct {
	cfg    Config
	synced chan struct{} // has a token once the pods are known: no use in waiting for the next tick

	mu   sync.Mutex // guards core, and that mappings are published in the order in which they were made
	core *Core
}

// change lets the core take in news, and publishes what is known then.
func (d *driver) change(f func(c *Core, now time.Time)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	before := d.core.resources.Problem + d.core.podsAPI.Problem
	f(d.core, now)
	m := d.core.Mapping(now)
	if after := m.Resources.Problem + m.PodsAPI.Problem; after != before {
		d.cfg.Logger.Info("what the kubelet answers changed", "pod_resources", words(m.Resources), "pods_api", words(m.PodsAPI))
	}
	d.cfg.Publish(m)
}

func words(a API) string {
	if a.Up {
		return "answers"
	}
	return a.Problem
}

// poll asks pod-resources again and again.
func (d *driver) poll(ctx context.Context, client podresources.PodResourcesListerClient) {
	ticker := time.NewTicker(d.cfg.Interval)
	defer ticker.Stop()
	for {
		began := time.Now()
		if d.cfg.Asked != nil {
			d.cfg.Asked(began)
		}
		d.change(func(c *Core, now time.Time) { c.Ask(now) })
		answer, err := list(ctx, client)
		if ctx.Err() != nil {
			return
		}
		d.change(func(c *Core, _ time.Time) {
			if err != nil {
				reason, problem := explain(err, "pod-resources", "mount the directory <kubelet-dir>/pod-resources and run as user 0")
				c.Failed(reason, problem)
				return
			}
			c.Answered(began, answer)
		})
		if d.cfg.Answered != nil {
			d.cfg.Answered(time.Now())
		}
		select {
		case <-ctx.Done():
			return
		case <-d.synced:
		case <-ticker.C:
		}
	}
}

func list(ctx context.Context, client podresources.PodResourcesListerClient) (Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	response, err := client.List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, err
	}
	return answerOf(response), nil
}

// answerOf keeps what the core needs; containers without a device that could be a GPU are left out here already.
func answerOf(response *podresources.ListPodResourcesResponse) Answer {
	var a Answer
	for _, pod := range response.GetPodResources() {
		for _, container := range pod.GetContainers() {
			for _, devices := range container.GetDevices() {
				if len(devices.GetDeviceIds()) == 0 {
					continue
				}
				a = append(a, Holder{Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName(),
					Resource: devices.GetResourceName(), DeviceIDs: devices.GetDeviceIds()})
			}
			for _, claim := range container.GetDynamicResources() {
				for _, r := range claim.GetClaimResources() {
					if r.GetDriverName() == driverDRA && r.GetDeviceName() != "" {
						a = append(a, Holder{Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName(),
							Resource: driverDRA, DeviceIDs: []string{r.GetDeviceName()}})
					}
				}
			}
		}
	}
	return a
}

// follow watches the pods, and opens a new watch when one ends.
func (d *driver) follow(ctx context.Context, client pods.PodsClient) {
	wait := time.Second
	for ctx.Err() == nil {
		synced, err := d.watch(ctx, client)
		if ctx.Err() != nil {
			return
		}
		if err == nil { // its time was up; the next one replaces what is known
			continue
		}
		reason, problem := explain(err, "the Pods API",
			"it needs Kubernetes 1.37 or the kubelet's feature gate PodsAPI, and the directory <kubelet-dir>/pods-api mounted; without it pods have no UID, and nothing per pod is exported")
		d.change(func(c *Core, now time.Time) { c.PodsLost(now, reason, problem) })
		if synced {
			wait = time.Second
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait)):
		}
		wait = min(2*wait, 10*time.Second)
	}
}

// watch follows one stream. It returns nil when the stream was trusted long enough.
func (d *driver) watch(ctx context.Context, client pods.PodsClient) (synced bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// One timer for both: how long the first list may take, then how long the stream is trusted.
	timer := time.AfterFunc(callTimeout, func() { cancel(context.DeadlineExceeded) })
	defer timer.Stop()
	var errTrusted = errors.New("trusted long enough")

	stream, err := client.WatchPods(ctx, &pods.WatchPodsRequest{})
	if err != nil {
		return false, cause(ctx, err)
	}
	var first []Pod
	for {
		event, err := stream.Recv()
		if err != nil {
			if context.Cause(ctx) == errTrusted {
				return true, nil
			}
			return synced, cause(ctx, err)
		}
		if event.GetType() == pods.EventType_INITIAL_SYNC_COMPLETE {
			d.change(func(c *Core, now time.Time) { c.Sync(now, first) })
			first, synced = nil, true
			timer.Stop()
			timer = time.AfterFunc(resync+rand.N(resync/5), func() { cancel(errTrusted) })
			defer timer.Stop()
			select {
			case d.synced <- struct{}{}:
			default:
			}
			continue
		}
		pod, err := decodePod(event.GetPod(), d.cfg.Labels)
		if err != nil {
			return synced, err
		}
		switch {
		case !synced:
			first = append(first, pod)
		case event.GetType() == pods.EventType_DELETED:
			d.change(func(c *Core, now time.Time) { c.Remove(now, pod.UID) })
		default:
			d.change(func(c *Core, now time.Time) { c.Update(now, pod) })
		}
	}
}

// cause prefers the reason for which we ended a call ourselves.
func cause(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil {
		return c
	}
	return err
}

// explain gives a failed call a reason to count and a sentence with the fix.
func explain(err error, who, fix string) (reason, problem string) {
	switch code := status.Code(err); {
	case errors.Is(err, errPod):
		return ReasonInvalid, fmt.Sprintf("%s sent what is no pod: %v", who, err)
	case errors.Is(err, context.DeadlineExceeded) || code == codes.DeadlineExceeded:
		return ReasonTimeout, fmt.Sprintf("%s does not answer within %s: is the kubelet stuck?", who, callTimeout)
	case code == codes.ResourceExhausted:
		return ReasonRateLimited, who + " refuses calls: too many clients on this node (100 calls a second for all of them)"
	case code == codes.FailedPrecondition:
		return ReasonNotReady, who + " is not ready: the kubelet is starting"
	case code == codes.Unimplemented:
		return ReasonAbsent, fmt.Sprintf("%s is not served by this kubelet: %s", who, fix)
	default:
		return ReasonUnreachable, fmt.Sprintf("%s does not answer (%s): %s", who, status.Convert(err).Message(), fix)
	}
}

package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// Annotations of the lease, by which the others find the holder.
const (
	annotationAddress = "capstan.dev/address"
	annotationKey     = "capstan.dev/key"
)

// Client is a job's objects at the API server: [Leases], [Records] and [Workload]. It reads from no cache.
type Client struct {
	api         kubernetes.Interface
	namespace   string
	statefulSet string
	uid         types.UID // of the StatefulSet; "" = only reading
}

// NewClient returns a client of the job of a StatefulSet. With its UID the objects that it makes are the StatefulSet's and go with it.
func NewClient(api kubernetes.Interface, namespace, statefulSet string, uid string) *Client {
	return &Client{api, namespace, statefulSet, types.UID(uid)}
}

// RingName is the name of the Lease and of the ConfigMap of a StatefulSet's ring.
func RingName(statefulSet string) string { return statefulSet + "-ring" }

// Place is what a pod's own object says of its agent.
type Place struct {
	StatefulSet  string
	UID          string // of the StatefulSet
	Service      string // headless, that names its pods
	FirstOrdinal int
	Ordinal      int
	PodUID       string
	IP           string
	Grace        time.Duration
	Revision     string // of the pod's template
}

// ErrNoStatefulSet says that a pod has no place in a ring.
var ErrNoStatefulSet = errors.New("it is no StatefulSet's: a ring's ranks follow the ordinals; make the workers a StatefulSet")

// Discover finds out whose worker a pod is.
func Discover(ctx context.Context, api kubernetes.Interface, namespace, pod string) (Place, error) {
	p, err := api.CoreV1().Pods(namespace).Get(ctx, pod, metav1.GetOptions{})
	if err != nil {
		return Place{}, fmt.Errorf("read our own pod %s/%s: %w", namespace, pod, err)
	}
	owner := metav1.GetControllerOf(p)
	ordinal := ordinalOf(pod)
	if owner == nil || owner.Kind != "StatefulSet" || ordinal < 0 {
		return Place{}, fmt.Errorf("pod %s/%s: %w", namespace, pod, ErrNoStatefulSet)
	}
	s, err := api.AppsV1().StatefulSets(namespace).Get(ctx, owner.Name, metav1.GetOptions{})
	if err != nil {
		return Place{}, fmt.Errorf("read our StatefulSet %s/%s: %w", namespace, owner.Name, err)
	}
	place := Place{
		StatefulSet: s.Name, UID: string(s.UID), Service: s.Spec.ServiceName, Ordinal: ordinal, PodUID: string(p.UID), IP: p.Status.PodIP,
		Grace: 30 * time.Second, Revision: p.Labels[appsv1.ControllerRevisionHashLabelKey],
	}
	if s.Spec.Ordinals != nil {
		place.FirstOrdinal = int(s.Spec.Ordinals.Start)
	}
	if g := p.Spec.TerminationGracePeriodSeconds; g != nil {
		place.Grace = time.Duration(*g) * time.Second
	}
	return place, nil
}

// ordinalOf is the number at the end of a pod's name, -1 if there is none.
func ordinalOf(pod string) int {
	n, err := strconv.ParseUint(pod[strings.LastIndexByte(pod, '-')+1:], 10, 31)
	if err != nil {
		return -1
	}
	return int(n)
}

// known makes the API server's answers those that are decided by.
func known(err error) error {
	switch {
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return fmt.Errorf("%w: %w", ErrConflict, err)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	return err
}

// meta is of an object that goes with the StatefulSet.
func (c *Client) meta(version string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{
		Namespace: c.namespace, Name: RingName(c.statefulSet), ResourceVersion: version,
		Labels: map[string]string{"app.kubernetes.io/managed-by": "capstan-agent"},
	}
	if c.uid != "" {
		m.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: c.statefulSet, UID: c.uid}}
	}
	return m
}

// Lease is [Leases]'.
func (c *Client) Lease(ctx context.Context) (Lease, error) {
	l, err := c.api.CoordinationV1().Leases(c.namespace).Get(ctx, RingName(c.statefulSet), metav1.GetOptions{})
	if err != nil {
		return Lease{}, fmt.Errorf("read the lease %s/%s: %w", c.namespace, RingName(c.statefulSet), known(err))
	}
	return leaseOf(l), nil
}

func leaseOf(l *coordinationv1.Lease) Lease {
	out := Lease{Address: l.Annotations[annotationAddress], Key: l.Annotations[annotationKey], Version: l.ResourceVersion}
	if l.Spec.HolderIdentity != nil {
		out.Holder = *l.Spec.HolderIdentity
	}
	if l.Spec.LeaseTransitions != nil {
		out.Transitions = int(*l.Spec.LeaseTransitions)
	}
	return out
}

// PutLease is [Leases]'. The times in it are for people: nobody decides by another's clock.
func (c *Client) PutLease(ctx context.Context, l Lease) (Lease, error) {
	now, seconds, transitions := metav1.NowMicro(), int32(leaseDuration/time.Second), int32(l.Transitions)
	object := &coordinationv1.Lease{ObjectMeta: c.meta(l.Version)}
	object.Annotations = map[string]string{annotationAddress: l.Address, annotationKey: l.Key}
	object.Spec = coordinationv1.LeaseSpec{HolderIdentity: &l.Holder, LeaseDurationSeconds: &seconds, RenewTime: &now, LeaseTransitions: &transitions}
	leases := c.api.CoordinationV1().Leases(c.namespace)
	var err error
	if l.Version == "" {
		object, err = leases.Create(ctx, object, metav1.CreateOptions{})
	} else {
		object, err = leases.Update(ctx, object, metav1.UpdateOptions{})
	}
	if err != nil {
		return Lease{}, fmt.Errorf("write the lease %s/%s: %w", c.namespace, RingName(c.statefulSet), known(err))
	}
	return leaseOf(object), nil
}

// WatchLease is [Leases]'.
func (c *Client) WatchLease(ctx context.Context) (<-chan Lease, error) {
	w, err := c.api.CoordinationV1().Leases(c.namespace).Watch(ctx, metav1.ListOptions{FieldSelector: named(RingName(c.statefulSet))})
	if err != nil {
		return nil, fmt.Errorf("watch the lease %s/%s: %w", c.namespace, RingName(c.statefulSet), known(err))
	}
	out := make(chan Lease)
	go func() {
		defer close(out)
		defer w.Stop()
		for e := range w.ResultChan() {
			l, ok := e.Object.(*coordinationv1.Lease)
			if !ok || e.Type != watch.Added && e.Type != watch.Modified {
				return // gone, or an error: what is to be known now, a read says
			}
			select {
			case out <- leaseOf(l):
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func named(name string) string { return fields.OneTermEqualSelector("metadata.name", name).String() }

// Phases of a job, as the record's ConfigMap has them under phase for kubectl wait.
const (
	PhaseRunning   = "Running"
	PhaseSucceeded = "Succeeded"
	PhaseFailed    = "Failed"
)

// PhaseOf is the phase of a job with this record.
func PhaseOf(r ring.Record) string {
	switch r.End {
	case ring.Succeeded:
		return PhaseSucceeded
	case ring.Failed:
		return PhaseFailed
	}
	return PhaseRunning
}

// Record is [Records]'.
func (c *Client) Record(ctx context.Context) (Stored, error) {
	m, err := c.api.CoreV1().ConfigMaps(c.namespace).Get(ctx, RingName(c.statefulSet), metav1.GetOptions{})
	if err != nil {
		return Stored{}, fmt.Errorf("read the ConfigMap %s/%s: %w", c.namespace, RingName(c.statefulSet), known(err))
	}
	return storedOf(m)
}

func storedOf(m *corev1.ConfigMap) (Stored, error) {
	s := Stored{Writer: m.Data["writer"], Version: m.ResourceVersion}
	if err := json.Unmarshal([]byte(m.Data["record"]), &s.Record); err != nil {
		return Stored{}, fmt.Errorf("read the ConfigMap %s/%s: record: %w; capstan-agent reset takes it away", m.Namespace, m.Name, err)
	}
	return s, nil
}

// PutRecord is [Records]'. Beside the record the ConfigMap has some of it for people.
func (c *Client) PutRecord(ctx context.Context, s Stored) (Stored, error) {
	data, err := json.Marshal(s.Record)
	if err != nil {
		return Stored{}, err
	}
	step := s.Record.Step
	if s.Record.End != "" {
		step = s.Record.EndStep
	}
	object := &corev1.ConfigMap{ObjectMeta: c.meta(s.Version), Data: map[string]string{
		"record": string(data), "writer": s.Writer, "phase": PhaseOf(s.Record), "generation": s.Record.Generation.String(),
		"world": fmt.Sprint(len(s.Record.Members)), "step": fmt.Sprint(step), "reason": cmp.Or(s.Record.EndReason, string(s.Record.Reason)),
	}}
	maps := c.api.CoreV1().ConfigMaps(c.namespace)
	if s.Version == "" {
		object, err = maps.Create(ctx, object, metav1.CreateOptions{})
	} else {
		object, err = maps.Update(ctx, object, metav1.UpdateOptions{})
	}
	if err != nil {
		return Stored{}, fmt.Errorf("write the ConfigMap %s/%s: %w", c.namespace, RingName(c.statefulSet), known(err))
	}
	return storedOf(object)
}

// DeleteRecord takes the record away, if it is still the one that was read.
func (c *Client) DeleteRecord(ctx context.Context, version string) error {
	err := c.api.CoreV1().ConfigMaps(c.namespace).Delete(ctx, RingName(c.statefulSet), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &version}})
	if err != nil {
		return fmt.Errorf("delete the ConfigMap %s/%s: %w", c.namespace, RingName(c.statefulSet), known(err))
	}
	return nil
}

// Keys reads the cluster's keys, which every ServiceAccount may.
func (c *Client) Keys(ctx context.Context) ([]byte, error) {
	return c.api.Discovery().RESTClient().Get().AbsPath("/openid/v1/jwks").DoRaw(ctx)
}

package agent

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

func object(name, uid string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "ml", Name: name, UID: types.UID(uid), Labels: map[string]string{"app": "training"}}
}

func statefulSet() *appsv1.StatefulSet {
	replicas := int32(3)
	s := &appsv1.StatefulSet{ObjectMeta: object("training", "job-1"), Spec: appsv1.StatefulSetSpec{
		Replicas: &replicas, ServiceName: "training-headless", Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "training"}},
		Ordinals: &appsv1.StatefulSetOrdinals{Start: 2},
	}}
	return s
}

func pod(name, uid, owner string, change func(*corev1.Pod)) *corev1.Pod {
	controller, grace := true, int64(90)
	p := &corev1.Pod{ObjectMeta: object(name, uid)}
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "training", UID: types.UID(owner), Controller: &controller}}
	p.Spec.TerminationGracePeriodSeconds = &grace
	p.Labels[appsv1.ControllerRevisionHashLabelKey] = "training-5d9"
	if change != nil {
		change(p)
	}
	return p
}

// versioned is a fake clientset that, unlike the plain one, gives objects versions and refuses to write over what it was not read from.
func versioned(objects ...runtime.Object) *fake.Clientset {
	c := fake.NewClientset(objects...)
	version := 100
	c.PrependReactor("*", "*", func(a k8stesting.Action) (bool, runtime.Object, error) {
		switch a := a.(type) {
		case k8stesting.UpdateActionImpl:
			o, _ := meta.Accessor(a.GetObject())
			there, err := c.Tracker().Get(a.GetResource(), a.GetNamespace(), o.GetName())
			if err != nil {
				return true, nil, err
			}
			if t, _ := meta.Accessor(there); t.GetResourceVersion() != o.GetResourceVersion() {
				return true, nil, apierrors.NewConflict(schema.GroupResource{}, o.GetName(), errors.New("version"))
			}
			version++
			o.SetResourceVersion(strconv.Itoa(version))
		case k8stesting.CreateActionImpl:
			o, _ := meta.Accessor(a.GetObject())
			version++
			o.SetResourceVersion(strconv.Itoa(version))
		}
		return false, nil, nil
	})
	return c
}

func TestClientLease(t *testing.T) {
	c := NewClient(versioned(), "ml", "training", "job-1")
	if _, err := c.Lease(t.Context()); !errors.Is(err, ErrNotFound) {
		t.Errorf("without a lease: %v, want %v", err, ErrNotFound)
	}
	changes, err := c.WatchLease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	first, err := c.PutLease(t.Context(), Lease{Holder: "training-2/u/1", Address: "10.0.0.2:29400", Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	if got := <-changes; got != first {
		t.Errorf("the watch says %+v, want %+v", got, first)
	}
	if _, err := c.PutLease(t.Context(), Lease{Holder: "training-3/u/1"}); !errors.Is(err, ErrConflict) {
		t.Errorf("made twice: %v, want %v", err, ErrConflict)
	}
	next := first
	next.Transitions = 4
	second, err := c.PutLease(t.Context(), next)
	if err != nil || second.Version == first.Version || second.Transitions != 4 || second.Key != "k" {
		t.Errorf("renewed: %+v, %v", second, err)
	}
	if _, err := c.PutLease(t.Context(), next); !errors.Is(err, ErrConflict) {
		t.Errorf("from an old version: %v, want %v", err, ErrConflict)
	}
	l, err := c.api.CoordinationV1().Leases("ml").Get(t.Context(), "training-ring", metav1.GetOptions{})
	if err != nil || *l.Spec.LeaseDurationSeconds != 15 || l.OwnerReferences[0].UID != "job-1" {
		t.Errorf("the object is %+v, %v; want 15 s, and the StatefulSet's", l, err)
	}
}

func TestClientRecord(t *testing.T) {
	c := NewClient(versioned(), "ml", "training", "job-1")
	if _, err := c.Record(t.Context()); !errors.Is(err, ErrNotFound) {
		t.Errorf("without a record: %v, want %v", err, ErrNotFound)
	}
	r := ring.Record{Job: "job-1", Generation: ring.Generation{Term: 2, Count: 7}, Members: []ring.ID{{Ordinal: 2, Pod: "u2", Boot: 1 << 60}}, Step: 40, Reason: ring.ScaleUp}
	first, err := c.PutRecord(t.Context(), Stored{Record: r, Writer: "training-2/u2/1"})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := c.Record(t.Context()); err != nil || cmp.Diff(first, got) != "" || cmp.Diff(r, got.Record) != "" {
		t.Errorf("it comes back as %+v, %v", got, err)
	}
	r.End, r.EndStep, r.EndReason = ring.Failed, 50, "out of memory"
	if _, err := c.PutRecord(t.Context(), Stored{Record: r, Version: first.Version}); err != nil {
		t.Error(err)
	}
	if _, err := c.PutRecord(t.Context(), Stored{Record: r, Version: first.Version}); !errors.Is(err, ErrConflict) {
		t.Errorf("over another's: %v, want %v", err, ErrConflict)
	}
	m, err := c.api.CoreV1().ConfigMaps("ml").Get(t.Context(), "training-ring", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	delete(m.Data, "record")
	want := map[string]string{"writer": "", "phase": "Failed", "generation": "2.7", "world": "1", "step": "50", "reason": "out of memory"}
	if diff := cmp.Diff(want, m.Data); diff != "" {
		t.Errorf("for people there is (-want +got)\n%s", diff)
	}
}

func TestClientPods(t *testing.T) {
	now := metav1.Now()
	running := func(p *corev1.Pod) {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	}
	waiting := func(reason, message string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}}
		}
	}
	api := versioned(statefulSet(),
		pod("training-10", "u10", "job-1", waiting("ImagePullBackOff", "")),
		pod("training-2", "u2", "job-1", running),
		pod("training-3", "u3", "job-1", func(p *corev1.Pod) { running(p); p.DeletionTimestamp, p.Finalizers = &now, []string{"x"} }),
		pod("training-4", "u4", "job-1", func(p *corev1.Pod) {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "0/3 nodes have a free GPU"}}
		}),
		pod("training-5", "u5", "another", running), // of a StatefulSet of the same name that was deleted
		pod("notebook", "u6", "job-1", running),
	)
	c := NewClient(api, "ml", "training", "job-1")
	got, err := c.Pods(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := ring.Pods{Replicas: 3, Pods: []ring.Pod{
		{Ordinal: 2, UID: "u2", Running: true}, {Ordinal: 3, UID: "u3", Waiting: "it is being deleted"},
		{Ordinal: 4, UID: "u4", Waiting: "0/3 nodes have a free GPU"}, {Ordinal: 10, UID: "u10", Waiting: "ImagePullBackOff"},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	for _, a := range api.Actions() {
		if l, ok := a.(k8stesting.ListActionImpl); ok && l.ListOptions.ResourceVersion != "" {
			t.Errorf("the list may come from a cache: version %q", l.ListOptions.ResourceVersion)
		}
	}
	changes, err := c.Changes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := api.CoreV1().Pods("ml").Delete(t.Context(), "training-10", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changes:
	case <-time.After(5 * time.Second):
		t.Error("a deleted pod was not noticed within 5 s")
	}
	if _, err := NewClient(api, "ml", "training", "job-0").Pods(t.Context()); err == nil || !strings.Contains(err.Error(), "was deleted") {
		t.Errorf("another StatefulSet's pods: %v, want that ours was deleted", err)
	}
}

func TestClientScale(t *testing.T) {
	api := versioned(statefulSet())
	if err := NewClient(api, "ml", "training", "job-1").ScaleToZero(t.Context()); err != nil {
		t.Fatal(err)
	}
	p, ok := api.Actions()[0].(k8stesting.PatchActionImpl)
	if !ok || p.Subresource != "scale" || p.Resource.Resource != "statefulsets" || string(p.Patch) != `{"spec":{"replicas":0}}` {
		t.Errorf("it does %+v, want a patch of the scale subresource", api.Actions()[0])
	}
}

func TestDiscover(t *testing.T) {
	api := versioned(statefulSet(), pod("training-4", "u4", "job-1", func(p *corev1.Pod) { p.Status.PodIP = "10.0.0.4" }),
		&corev1.Pod{ObjectMeta: object("notebook-1", "u9")})
	got, err := Discover(t.Context(), api, "ml", "training-4")
	want := Place{StatefulSet: "training", UID: "job-1", Service: "training-headless", FirstOrdinal: 2, Ordinal: 4, PodUID: "u4", IP: "10.0.0.4", Grace: 90 * time.Second, Revision: "training-5d9"}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got)\n%s", err, diff)
	}
	if _, err := Discover(t.Context(), api, "ml", "notebook-1"); err == nil || !strings.Contains(err.Error(), "make the workers a StatefulSet") {
		t.Errorf("a pod of no StatefulSet: %v", err)
	}
	if _, err := Discover(t.Context(), api, "ml", "training-9"); err == nil || !strings.Contains(err.Error(), "training-9") {
		t.Errorf("a pod that is not there: %v", err)
	}
}

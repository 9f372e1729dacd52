package workloads

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"pgregory.net/rapid"

	"github.com/capstan-gpu/capstan/rules"
)

func TestBuild(t *testing.T) {
	ask := func(metric string) []Ask { return []Ask{{Metric: metric}} }
	pod := func(owner, name, uid string, gpus int) Pod {
		return Pod{Namespace: "ns", Owner: owner, Pod: rules.Pod{Name: name, UID: uid, GPUs: gpus}}
	}
	v := Build(
		[]HPA{
			{Namespace: "ns", Name: "ours", TargetKind: "StatefulSet", TargetName: "idle", Asks: ask("gpu_utilization")},
			{Namespace: "ns", Name: "theirs", TargetKind: "StatefulSet", TargetName: "web", Asks: ask("queue_length")},
		},
		[]StatefulSet{
			{Namespace: "ns", Name: "web", UID: "web"},                   // neither GPUs nor an HPA of ours
			{Namespace: "ns", Name: "idle", UID: "idle"},                 // an HPA asks, though there is no GPU in sight
			{Namespace: "ns", Name: "zero", UID: "zero", GPUs: 1},        // GPUs in its template, no pods
			{Namespace: "ns", Name: "job", UID: "job"},                   // pods with GPUs
			{Namespace: "a", Name: "job", UID: "other", GPUs: 2},         // the same name elsewhere
			{Namespace: "ns", Name: "job-old", UID: "job-old-recreated"}, // owns nothing: its pods are its predecessor's
		},
		[]Pod{
			pod("job", "job-10", "10", 1), pod("job", "job-2", "2", 0), pod("job", "job-2", "1", 1), pod("web", "web-0", "w", 0), pod("job-old", "job-old-0", "o", 1),
		},
		[]string{"gpu_utilization"})
	want := []rules.Workload{
		{Namespace: "a", Name: "job", UID: "other"},
		{Namespace: "ns", Name: "idle", UID: "idle"},
		{Namespace: "ns", Name: "job", UID: "job", Pods: []rules.Pod{{Name: "job-10", UID: "10", GPUs: 1}, {Name: "job-2", UID: "1", GPUs: 1}, {Name: "job-2", UID: "2"}}},
		{Namespace: "ns", Name: "zero", UID: "zero"},
	}
	if diff := cmp.Diff(want, v.Workloads); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if !v.Asked("ns", "idle", "gpu_utilization") || v.Asked("ns", "idle", "other") || v.Asked("ns", "web", "queue_length") || v.Asked("a", "idle", "gpu_utilization") {
		t.Error("who is asked for is wrong")
	}
}

func TestGPUs(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	list := func(pairs ...string) corev1.ResourceList {
		out := corev1.ResourceList{}
		for i := 0; i < len(pairs); i += 2 {
			out[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
		}
		return out
	}
	container := func(requests, limits corev1.ResourceList) corev1.Container {
		return corev1.Container{Resources: corev1.ResourceRequirements{Requests: requests, Limits: limits}}
	}
	f := func(what string, want int, spec corev1.PodSpec) {
		t.Helper()
		if got := GPUsOf(&spec); got != want {
			t.Errorf("%s: %d GPUs, want %d", what, got, want)
		}
	}
	one := container(list("nvidia.com/gpu", "1"), nil)
	f("none", 0, corev1.PodSpec{Containers: []corev1.Container{container(list("cpu", "4"), nil)}})
	f("two containers", 2, corev1.PodSpec{Containers: []corev1.Container{one, one}})
	f("limit only", 2, corev1.PodSpec{Containers: []corev1.Container{container(nil, list("nvidia.com/gpu", "2"))}})
	f("both", 2, corev1.PodSpec{Containers: []corev1.Container{container(list("nvidia.com/gpu", "2"), list("nvidia.com/gpu", "2"))}})
	f("MIG, shared, others", 4, corev1.PodSpec{Containers: []corev1.Container{container(list("nvidia.com/mig-1g.10gb", "1", "nvidia.com/gpu.shared", "1", "amd.com/gpu", "2", "example.com/gpu-driver", "7"), nil)}})
	f("init container", 3, corev1.PodSpec{InitContainers: []corev1.Container{container(list("nvidia.com/gpu", "3"), nil)}, Containers: []corev1.Container{one}})
	sidecar := one
	sidecar.RestartPolicy = &always
	f("sidecar", 2, corev1.PodSpec{InitContainers: []corev1.Container{sidecar}, Containers: []corev1.Container{one}})
}

// TestWatcher sends the API's own objects through the informers.
func TestWatcher(t *testing.T) {
	ready := metav1.NewTime(time.Unix(1000, 0))
	gpu := corev1.PodSpec{NodeName: "node-a", Containers: []corev1.Container{{Image: "x", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("2")}}}}}
	yes := true
	owner := func(kind, version, name, uid string) []metav1.OwnerReference {
		return []metav1.OwnerReference{{APIVersion: version, Kind: kind, Name: name, UID: types.UID(uid), Controller: &yes}}
	}
	pod := func(name, uid string, owners []metav1.OwnerReference) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(uid), OwnerReferences: owners, Labels: map[string]string{"statefulset.kubernetes.io/pod-name": name}},
			Spec:       gpu,
			Status:     corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: ready}}},
		}
	}
	worker := pod("job-0", "p0", owner("StatefulSet", "apps/v1", "job", "s"))
	leaving := pod("job-1", "p1", owner("StatefulSet", "apps/v1", "job", "s"))
	leaving.DeletionTimestamp, leaving.Finalizers = &ready, []string{"x/y"}
	leaving.Status.Conditions[0].Status = corev1.ConditionFalse
	unlabelled := pod("job-2", "p2", owner("StatefulSet", "apps/v1", "job", "s"))
	unlabelled.Labels = nil
	client := fake.NewClientset(
		worker, leaving, unlabelled,
		pod("notebook", "p3", nil),
		pod("rs", "p4", owner("ReplicaSet", "apps/v1", "job", "s")),
		pod("cloneset", "p5", owner("StatefulSet", "apps.kruise.io/v1", "job", "s")),
		&appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "done", UID: "d", Annotations: map[string]string{"capstan.dev/ended": "d failed: no data"}}, Spec: appsv1.StatefulSetSpec{Template: corev1.PodTemplateSpec{Spec: gpu}}},
		// A copy of another that has ended.
		&appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "job", UID: "s", Annotations: map[string]string{"capstan.dev/ended": "d failed: no data"}}, Spec: appsv1.StatefulSetSpec{Template: corev1.PodTemplateSpec{Spec: gpu}}},
		&autoscalingv2.HorizontalPodAutoscaler{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "hpa"},
			Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
				ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "job"},
				Metrics: []autoscalingv2.MetricSpec{
					{Type: autoscalingv2.ResourceMetricSourceType, Resource: &autoscalingv2.ResourceMetricSource{Name: "cpu"}},
					{Type: autoscalingv2.ExternalMetricSourceType, External: &autoscalingv2.ExternalMetricSource{Metric: autoscalingv2.MetricIdentifier{Name: "GPU_Utilization", Selector: &metav1.LabelSelector{}}}},
					{Type: autoscalingv2.ExternalMetricSourceType, External: &autoscalingv2.ExternalMetricSource{Metric: autoscalingv2.MetricIdentifier{Name: "other", Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"workload": "job"}}}}},
					{Type: autoscalingv2.ExternalMetricSourceType, External: &autoscalingv2.ExternalMetricSource{Metric: autoscalingv2.MetricIdentifier{Name: "broken", Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a b": ""}}}}},
				},
			},
		},
	)
	w := NewWatcher(client)
	if ok, what := w.Synced(); ok || what != "HorizontalPodAutoscalers, StatefulSets, pods" {
		t.Errorf("before Run: synced %v, waiting for %q", ok, what)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { w.Run(ctx); close(done) }()
	defer func() { cancel(); <-done }()
	eventually(t, "synced", func() bool { ok, _ := w.Synced(); return ok })

	v := w.View([]string{"gpu_utilization"})
	want := []rules.Workload{{Namespace: "ns", Name: "done", UID: "d", Ended: "failed: no data"}, {Namespace: "ns", Name: "job", UID: "s", Pods: []rules.Pod{
		{UID: "p0", Name: "job-0", Node: "node-a", Phase: "Running", Ready: true, ReadySince: ready.Time, GPUs: 2},
		{UID: "p1", Name: "job-1", Node: "node-a", Phase: "Running", Terminating: true, GPUs: 2},
	}}}
	if diff := cmp.Diff(want, v.Workloads, cmpopts.EquateApproxTime(0)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	h := v.hpas["ns"][0]
	if len(h.Asks) != 2 || h.Asks[0].Metric != "gpu_utilization" || h.Asks[0].Selector != nil || h.Asks[1].Selector.String() != "workload=job" {
		t.Errorf("asks: %v", h.Asks)
	}

	// A pod that left, and one of the same name that came.
	pods := client.CoreV1().Pods("ns")
	if err := pods.Delete(ctx, "job-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := pods.Create(ctx, pod("job-0", "p0-new", owner("StatefulSet", "apps/v1", "job", "s")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new pod", func() bool {
		v := w.View([]string{"gpu_utilization"})
		return len(v.Workloads) == 2 && len(v.Workloads[1].Pods) == 2 && v.Workloads[1].Pods[0].UID == "p0-new"
	})
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

func TestSelectorSafe(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		if got := SelectorSafe(in); got != want {
			t.Errorf("SelectorSafe(%q) = %q, want %q", in, got, want)
		}
	}
	f("mnist-training-worker-0", "mnist-training-worker-0")
	f("NVIDIA H200", "NVIDIA-H200")
	f("NVIDIA A100-SXM4-80GB_NVIDIA H200", "NVIDIA-A100-SXM4-80GB_NVIDIA-H200")
	f(" (x) ", "x")
	f("", "")
	f("显卡", "")
	f(strings.Repeat("a", 62)+".b", strings.Repeat("a", 62))
	rapid.Check(t, func(t *rapid.T) {
		in := rapid.String().Draw(t, "value")
		out := SelectorSafe(in)
		if _, err := labels.NewRequirement("key", "=", []string{out}); err != nil {
			t.Errorf("SelectorSafe(%q) = %q: %v", in, out, err)
		}
		if SelectorSafe(out) != out {
			t.Errorf("SelectorSafe(%q) = %q, and again another", in, out)
		}
	})
}

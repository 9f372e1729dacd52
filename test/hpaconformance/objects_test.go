package hpaconformance

import (
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	_ "k8s.io/kubernetes/pkg/apis/autoscaling/install" // the defaults of the API server

	"github.com/capstan-gpu/capstan/hpa"
)

const container = "worker"

func pointer[T any](v T) *T { return &v }

func quantity(v hpa.Milli) resource.Quantity {
	return *resource.NewMilliQuantity(int64(v), resource.DecimalSI)
}

// manifest is the HPA as the API server stores it, its defaults filled in.
func manifest(s hpa.Spec) *autoscalingv2.HorizontalPodAutoscaler {
	object := &autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Name: workload, Namespace: namespace, UID: "1", Generation: 1},
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: workload},
			MinReplicas:    &s.MinReplicas,
			MaxReplicas:    s.MaxReplicas,
		},
	}
	for _, m := range s.Metrics {
		object.Spec.Metrics = append(object.Spec.Metrics, metricSpec(m))
	}
	if s.Behavior != nil {
		object.Spec.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleUp: scalingRules(s.Behavior.ScaleUp), ScaleDown: scalingRules(s.Behavior.ScaleDown)}
	}
	legacyscheme.Scheme.Default(object)
	return object
}

func metricSpec(m hpa.Metric) autoscalingv2.MetricSpec {
	out := autoscalingv2.MetricSpec{Type: autoscalingv2.MetricSourceType(m.Source)}
	target := autoscalingv2.MetricTarget{Type: autoscalingv2.MetricTargetType(m.Target.Type)}
	switch m.Target.Type {
	case hpa.Value:
		target.Value = pointer(quantity(m.Target.Value))
	case hpa.AverageValue:
		target.AverageValue = pointer(quantity(m.Target.Value))
	case hpa.Utilization:
		target.AverageUtilization = &m.Target.Percent
	}
	identifier := autoscalingv2.MetricIdentifier{Name: m.Name}
	switch m.Source {
	case hpa.External:
		out.External = &autoscalingv2.ExternalMetricSource{Metric: identifier, Target: target}
	case hpa.Object:
		out.Object = &autoscalingv2.ObjectMetricSource{Metric: identifier, Target: target, DescribedObject: autoscalingv2.CrossVersionObjectReference{APIVersion: "v1", Kind: "Service", Name: workload}}
	case hpa.Pods:
		out.Pods = &autoscalingv2.PodsMetricSource{Metric: identifier, Target: target}
	case hpa.Resource:
		out.Resource = &autoscalingv2.ResourceMetricSource{Name: corev1.ResourceName(m.Name), Target: target}
	case hpa.ContainerResource:
		out.ContainerResource = &autoscalingv2.ContainerResourceMetricSource{Name: corev1.ResourceName(m.Name), Container: container, Target: target}
	}
	return out
}

func scalingRules(r hpa.Rules) *autoscalingv2.HPAScalingRules {
	if r.StabilizationWindow == nil && r.SelectPolicy == "" && len(r.Policies) == 0 && r.Tolerance == nil {
		return nil
	}
	out := &autoscalingv2.HPAScalingRules{}
	if w := r.StabilizationWindow; w != nil {
		out.StabilizationWindowSeconds = pointer(int32(*w / time.Second))
	}
	if r.SelectPolicy != "" {
		out.SelectPolicy = pointer(autoscalingv2.ScalingPolicySelect(r.SelectPolicy))
	}
	for _, p := range r.Policies {
		out.Policies = append(out.Policies, autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.HPAScalingPolicyType(p.Type), Value: p.Value, PeriodSeconds: int32(p.Period / time.Second)})
	}
	if r.Tolerance != nil {
		out.Tolerance = pointer(resource.MustParse(tolerances[*r.Tolerance]))
	}
	return out
}

// podObject is a pod as the API server has it, with the requests that the readings tell of.
func podObject(p hpa.Pod, all []hpa.Metric, readings []hpa.Reading) *corev1.Pod {
	out := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: namespace, Labels: map[string]string{"app": workload}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: container}}},
		Status:     corev1.PodStatus{Phase: corev1.PodPhase(p.Phase)},
	}
	if p.Terminating {
		out.DeletionTimestamp = pointer(metav1.NewTime(time.Now()))
	}
	if p.Ready != "" {
		out.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionStatus(p.Ready), LastTransitionTime: metav1.NewTime(p.ReadySince)}}
	}
	if !p.Started.IsZero() {
		out.Status.StartTime = pointer(metav1.NewTime(p.Started))
	}
	for i, m := range all {
		if request, ok := readings[i].Requests[p.Name]; ok {
			out.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceName(m.Name): quantity(request)}
		}
	}
	return out
}

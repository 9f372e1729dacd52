package workloads

import (
	"context"
	"strings"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	appsinformers "k8s.io/client-go/informers/apps/v1"
	autoscalinginformers "k8s.io/client-go/informers/autoscaling/v2"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
)

// Watcher follows the API server. What it stores of an object is a few hundred bytes.
type Watcher struct {
	hpas, sets, pods cache.SharedIndexInformer
}

// The informers store these in place of the API's types.
type (
	storedHPA struct {
		metav1.ObjectMeta
		HPA
	}
	storedSet struct {
		metav1.ObjectMeta
		StatefulSet
	}
	storedPod struct {
		metav1.ObjectMeta
		Pod
	}
)

// NewWatcher makes a Watcher and starts nothing. It needs to list and watch HPAs, StatefulSets and pods of all
// namespaces; of the pods, only those that carry the label that the StatefulSet controller puts on its own.
func NewWatcher(client kubernetes.Interface) *Watcher {
	w := &Watcher{
		hpas: autoscalinginformers.NewFilteredHorizontalPodAutoscalerInformer(client, metav1.NamespaceAll, 0, cache.Indexers{}, nil),
		sets: appsinformers.NewFilteredStatefulSetInformer(client, metav1.NamespaceAll, 0, cache.Indexers{}, nil),
		pods: coreinformers.NewFilteredPodInformer(client, metav1.NamespaceAll, 0, cache.Indexers{}, func(o *metav1.ListOptions) {
			o.LabelSelector = appsv1.StatefulSetPodNameLabel
		}),
	}
	for _, informer := range w.informers() {
		if err := informer.SetTransform(trim); err != nil {
			panic(err) // only an informer that runs already says so
		}
	}
	return w
}

func (w *Watcher) informers() []cache.SharedIndexInformer {
	return []cache.SharedIndexInformer{w.hpas, w.sets, w.pods}
}

// Run watches until ctx is done.
func (w *Watcher) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, informer := range w.informers() {
		wg.Go(func() { informer.RunWithContext(ctx) })
	}
	wg.Wait()
}

// Synced says whether the first lists have arrived, or else what is waited for.
func (w *Watcher) Synced() (bool, string) {
	var missing []string
	for i, informer := range w.informers() {
		if !informer.HasSynced() {
			missing = append(missing, []string{"HorizontalPodAutoscalers", "StatefulSets", "pods"}[i])
		}
	}
	return len(missing) == 0, strings.Join(missing, ", ")
}

// View is [Build] on what is known now.
func (w *Watcher) View(metrics []string) *View {
	storedHPAs, storedSets, storedPods := w.hpas.GetStore().List(), w.sets.GetStore().List(), w.pods.GetStore().List()
	hpas := make([]HPA, len(storedHPAs))
	for i, o := range storedHPAs {
		hpas[i] = o.(*storedHPA).HPA
	}
	sets := make([]StatefulSet, len(storedSets))
	for i, o := range storedSets {
		sets[i] = o.(*storedSet).StatefulSet
	}
	pods := make([]Pod, 0, len(storedPods))
	for _, o := range storedPods {
		if p := o.(*storedPod); p.Owner != "" {
			pods = append(pods, p.Pod)
		}
	}
	return Build(hpas, sets, pods, metrics)
}

// trim reduces an object to what is stored. It is idempotent: informers may call it twice on one object.
func trim(object any) (any, error) {
	switch o := object.(type) {
	case *autoscalingv2.HorizontalPodAutoscaler:
		return &storedHPA{meta(o), hpaOf(o)}, nil
	case *appsv1.StatefulSet:
		return &storedSet{meta(o), StatefulSet{o.Namespace, o.Name, string(o.UID), GPUsOf(&o.Spec.Template.Spec), endedOf(o)}}, nil
	case *corev1.Pod:
		return &storedPod{meta(o), podOf(o)}, nil
	}
	return object, nil
}

// meta keeps what an informer needs.
func meta(o metav1.Object) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUID(), ResourceVersion: o.GetResourceVersion()}
}

// endedOf is how the job of a StatefulSet ended. What was copied from another one, with its annotations, says nothing of this one.
func endedOf(o *appsv1.StatefulSet) string {
	uid, how, _ := strings.Cut(o.Annotations[metricname.AnnotationEnded], " ")
	if uid != string(o.UID) {
		return ""
	}
	return strings.TrimSpace(how)
}

func hpaOf(o *autoscalingv2.HorizontalPodAutoscaler) HPA {
	h := HPA{Namespace: o.Namespace, Name: o.Name, TargetKind: o.Spec.ScaleTargetRef.Kind, TargetName: o.Spec.ScaleTargetRef.Name}
	for _, m := range o.Spec.Metrics {
		if m.Type == autoscalingv2.PodsMetricSourceType && m.Pods != nil {
			h.Pods = append(h.Pods, strings.ToLower(m.Pods.Metric.Name))
		}
		if m.Type != autoscalingv2.ExternalMetricSourceType || m.External == nil {
			continue
		}
		ask := Ask{Metric: strings.ToLower(m.External.Metric.Name)}
		if m.External.Metric.Selector != nil {
			s, err := metav1.LabelSelectorAsSelector(m.External.Metric.Selector)
			if err != nil {
				continue // the HPA controller refuses it, too, and never asks
			}
			if !s.Empty() {
				ask.Selector = s
			}
		}
		h.Asks = append(h.Asks, ask)
	}
	return h
}

func podOf(o *corev1.Pod) Pod {
	p := Pod{Namespace: o.Namespace, Labels: LabelsOf(o.Labels), Pod: rules.Pod{
		UID: string(o.UID), Name: o.Name, Node: o.Spec.NodeName,
		Phase: string(o.Status.Phase), Terminating: o.DeletionTimestamp != nil, GPUs: GPUsOf(&o.Spec),
	}}
	if owner := metav1.GetControllerOfNoCopy(o); owner != nil && owner.Kind == kindStatefulSet && strings.HasPrefix(owner.APIVersion, "apps/") {
		p.Owner = string(owner.UID)
	}
	for _, c := range o.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			p.Ready, p.ReadySince = true, c.LastTransitionTime.Time
		}
	}
	return p
}

// GPUsOf counts the GPUs that a pod requests: of every resource whose name ends in "gpu", such as nvidia.com/gpu, or in
// "gpu.shared", and of NVIDIA's MIG profiles, such as nvidia.com/mig-1g.10gb. Init containers run before the others and give back what they
// held, so that the larger of both counts; sidecars stay.
func GPUsOf(spec *corev1.PodSpec) int {
	var running, peak int
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			running += gpusOf(c)
			continue
		}
		peak = max(peak, running+gpusOf(c))
	}
	for i := range spec.Containers {
		running += gpusOf(&spec.Containers[i])
	}
	return max(running, peak)
}

// gpusOf reads requests and, as the API server does by default for extended resources, limits where there is no request.
func gpusOf(c *corev1.Container) int {
	n := int64(0)
	for name, q := range c.Resources.Limits {
		if _, requested := c.Resources.Requests[name]; !requested && isGPU(name) {
			n += q.Value()
		}
	}
	for name, q := range c.Resources.Requests {
		if isGPU(name) {
			n += q.Value()
		}
	}
	return int(n)
}

func isGPU(name corev1.ResourceName) bool {
	return strings.HasSuffix(strings.TrimSuffix(string(name), ".shared"), "gpu") || strings.HasPrefix(string(name), "nvidia.com/mig-")
}

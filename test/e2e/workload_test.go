package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/metrics/pkg/apis/external_metrics/v1beta1"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	dto "github.com/prometheus/client_model/go"

	"github.com/capstan-gpu/capstan/images/image"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/test/rig"
)

// scene is one test's namespace on the shared cluster.
type scene struct {
	*testing.T
	ctx context.Context
	ns  string
}

// begin makes a namespace of the test's own and takes back every pinned GPU value, before and after it.
func begin(t *testing.T) *scene {
	t.Helper()
	if cluster == nil {
		t.Skip("needs a cluster: set CAPSTAN_E2E=1 (as make test does) to start one on this machine, as root on Linux")
	}
	s := &scene{T: t, ctx: t.Context(), ns: "e2e-" + strings.ToLower(strings.TrimPrefix(t.Name(), "Test"))}
	s.ns = s.ns[:min(len(s.ns), 50)]
	_, err := cluster.Clients.CoreV1().Namespaces().Create(s.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.ns}}, metav1.CreateOptions{})
	s.must(err)
	s.unpin(s.ctx)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if t.Failed() {
			t.Logf("namespace %s\n%s\nlogs of the cluster's parts: %s", s.ns, cluster.Describe(ctx, s.ns), cluster.Status.Logs)
			for _, ns := range []string{rig.SystemNamespace, rig.NodeNamespace} {
				t.Logf("namespace %s\n%s", ns, cluster.Describe(ctx, ns))
			}
		}
		s.unpin(ctx)
		// GPUs must be free again for the next test: wait until the pods are gone.
		if _, err := cluster.Kubectl(ctx, "delete", "namespace", s.ns, "--wait=true", "--timeout=90s"); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (s *scene) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// until fails the test with the last state when check does not come true in time.
func (s *scene) until(limit time.Duration, what string, check func(context.Context) (bool, string, error)) {
	s.Helper()
	began := time.Now()
	if err := rig.Until(s.ctx, limit, what, check); err != nil {
		s.Fatal(err)
	}
	s.Logf("%s (%.1fs)", what, time.Since(began).Seconds())
}

// pin fixes what every GPU of every node shows as utilization, in percent.
func (s *scene) pin(percent int) {
	s.Helper()
	for _, node := range s.nodes() {
		_, err := cluster.Fakegpu(s.ctx, node, "set", "--utilization", fmt.Sprint(percent))
		s.must(err)
	}
}

func (s *scene) unpin(ctx context.Context) {
	s.Helper()
	nodes, err := cluster.Nodes(ctx)
	s.must(err)
	for _, node := range nodes {
		if _, err := cluster.Fakegpu(ctx, node, "unset"); err != nil {
			s.Error(err)
		}
	}
}

func (s *scene) nodes() []string {
	s.Helper()
	nodes, err := cluster.Nodes(s.ctx)
	s.must(err)
	return nodes
}

// workers makes a worker StatefulSet whose pods hold GPUs and do nothing with them: what these show is pinned.
func (s *scene) workers(name string, replicas, gpus int32, more ...func(*corev1.PodSpec)) {
	s.Helper()
	labels := map[string]string{"app": name}
	spec := workerPod(gpus)
	for _, f := range more {
		f(&spec)
	}
	_, err := cluster.Clients.AppsV1().StatefulSets(s.ns).Create(s.ctx, &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.StatefulSetSpec{
			Replicas:            &replicas,
			ServiceName:         name,
			PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector:            &metav1.LabelSelector{MatchLabels: labels},
			Template:            corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: spec},
		},
	}, metav1.CreateOptions{})
	s.must(err)
}

func workerPod(gpus int32) corev1.PodSpec {
	grace := int64(2)
	quantity := resource.MustParse(fmt.Sprint(gpus))
	return corev1.PodSpec{
		TerminationGracePeriodSeconds: &grace,
		Containers: []corev1.Container{{
			Name:  "trainer",
			Image: image.Ref("trainer"),
			Args:  []string{"worker", "--source", "http://127.0.0.1:1", "--stats-listen", ":9402"},
			Resources: corev1.ResourceRequirements{
				Limits:   corev1.ResourceList{"nvidia.com/gpu": quantity},
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m")},
			},
		}},
	}
}

// ready waits until so many pods of a StatefulSet are Ready.
func (s *scene) ready(name string, replicas int32) {
	s.Helper()
	s.until(90*time.Second, fmt.Sprintf("%d workers of %s are ready", replicas, name), func(ctx context.Context) (bool, string, error) {
		set, err := cluster.Clients.AppsV1().StatefulSets(s.ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return false, "", err
		}
		return set.Status.ReadyReplicas == replicas && set.Status.Replicas == replicas, fmt.Sprintf("%d of %d", set.Status.ReadyReplicas, set.Status.Replicas), nil
	})
}

// hpa makes an HPA for a StatefulSet on gpu_utilization with target 80; selector may be nil.
func (s *scene) hpa(name, target string, least, most int32, selector map[string]string) {
	s.Helper()
	metric := autoscalingv2.MetricIdentifier{Name: rig.Metric}
	if selector != nil {
		metric.Selector = &metav1.LabelSelector{MatchLabels: selector}
	}
	value := resource.MustParse("80")
	_, err := cluster.Clients.AutoscalingV2().HorizontalPodAutoscalers(s.ns).Create(s.ctx, &autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: target},
			MinReplicas:    &least,
			MaxReplicas:    most,
			Metrics: []autoscalingv2.MetricSpec{{
				Type: autoscalingv2.ExternalMetricSourceType,
				External: &autoscalingv2.ExternalMetricSource{
					Metric: metric,
					Target: autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: &value},
				},
			}},
		},
	}, metav1.CreateOptions{})
	s.must(err)
}

// values reads the metric as the HPA does: percent by pod, or the error.
func (s *scene) values(selector string) (map[string]float64, error) {
	items, err := cluster.External(s.ctx, s.ns, rig.Metric, selector)
	if err != nil {
		return nil, err
	}
	byPod := map[string]float64{}
	for _, item := range items {
		pod := item.MetricLabels["pod"]
		if _, twice := byPod[pod]; twice {
			return nil, fmt.Errorf("two items for pod %s: %v", pod, items)
		}
		byPod[pod] = float64(item.Value.MilliValue()) / 1000
	}
	return byPod, nil
}

// serves waits until the metric serves exactly these pods, each within 1 of the value.
func (s *scene) serves(limit time.Duration, selector string, want map[string]float64) {
	s.Helper()
	s.until(limit, fmt.Sprintf("the adapter serves %v", want), func(context.Context) (bool, string, error) {
		got, err := s.values(selector)
		if err != nil {
			return false, err.Error(), nil
		}
		ok := len(got) == len(want)
		for pod, v := range want {
			g, there := got[pod]
			ok = ok && there && g > v-1 && g < v+1
		}
		return ok, fmt.Sprint(got), nil
	})
}

// adapterPods are those of the adapter that are not on their way out.
func (s *scene) adapterPods() []corev1.Pod {
	s.Helper()
	pods, err := cluster.Clients.CoreV1().Pods(rig.SystemNamespace).List(s.ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=capstan-adapter"})
	s.must(err)
	return slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
}

// adapters are ways to each of the adapter's pods, past the Service: they tick on their own, so that one may know what another does not yet.
func (s *scene) adapters() (each []*rig.Cluster) {
	s.Helper()
	for _, p := range s.adapterPods() {
		config := rest.CopyConfig(cluster.Config)
		config.Host = "https://" + s.forward(rig.SystemNamespace, "pod/"+p.Name, "6443")
		config.Insecure, config.CAFile, config.CAData = true, "", nil // the forward has another name than the certificate
		clients, err := kubernetes.NewForConfig(config)
		s.must(err)
		each = append(each, &rig.Cluster{Clients: clients, Config: config})
	}
	if len(each) == 0 {
		s.Fatal("the adapter has no pod")
	}
	return each
}

// everywhere waits until what each of the adapter's pods answers satisfies check.
func (s *scene) everywhere(limit time.Duration, what string, check func([]v1beta1.ExternalMetricValue, error) bool) {
	s.Helper()
	adapters := s.adapters()
	s.until(limit, fmt.Sprintf("each of %d adapters %s", len(adapters), what), func(ctx context.Context) (bool, string, error) {
		for _, a := range adapters {
			if items, err := a.External(ctx, s.ns, rig.Metric, ""); !check(items, err) {
				return false, fmt.Sprintf("%s: %v, %v", a.Config.Host, items, err), nil
			}
		}
		return true, "", nil
	})
}

// condition waits until the HPA is (in)active with a message that holds every one of the words.
func (s *scene) condition(hpa string, limit time.Duration, status corev1.ConditionStatus, words ...string) {
	s.Helper()
	s.until(limit, fmt.Sprintf("the HPA %s has ScalingActive=%s and says %q", hpa, status, words), func(ctx context.Context) (bool, string, error) {
		h, err := cluster.HPA(ctx, s.ns, hpa)
		if err != nil {
			return false, "", err
		}
		got, reason, message := rig.Condition(h, autoscalingv2.ScalingActive)
		ok := got == status
		for _, w := range words {
			ok = ok && strings.Contains(message, w)
		}
		return ok, fmt.Sprintf("%s %s %s", got, reason, message), nil
	})
}

// replicas is the size that a StatefulSet is asked to have.
func (s *scene) replicas(name string) int32 {
	s.Helper()
	set, err := cluster.Clients.AppsV1().StatefulSets(s.ns).Get(s.ctx, name, metav1.GetOptions{})
	s.must(err)
	return *set.Spec.Replicas
}

// watchFloor reads the StatefulSet's size until stop is called; stop returns the smallest size and the smallest value of the
// metric that were seen.
func (s *scene) watchFloor(name string) (stop func() (replicas int32, value float64)) {
	ctx, cancel := context.WithCancel(s.ctx)
	type floor struct {
		replicas int32
		value    float64
	}
	result := make(chan floor)
	go func() {
		least := floor{replicas: 1 << 30, value: 1e9}
		for ctx.Err() == nil {
			if set, err := cluster.Clients.AppsV1().StatefulSets(s.ns).Get(ctx, name, metav1.GetOptions{}); err == nil {
				least.replicas = min(least.replicas, *set.Spec.Replicas)
			}
			if items, err := cluster.External(ctx, s.ns, rig.Metric, ""); err == nil {
				for _, item := range items {
					least.value = min(least.value, float64(item.Value.MilliValue())/1000)
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
		result <- least
	}()
	return func() (int32, float64) {
		cancel()
		least := <-result
		return least.replicas, least.value
	}
}

// page is an exporter's whole page, by family.
func (s *scene) page(node string) map[string]*dto.MetricFamily {
	s.Helper()
	var families map[string]*dto.MetricFamily
	s.until(time.Minute, "the exporter on "+node+" answers", func(ctx context.Context) (bool, string, error) {
		pod, err := cluster.PodOn(ctx, rig.NodeNamespace, "app.kubernetes.io/name=capstan-exporter", node)
		if err != nil {
			return false, err.Error(), nil
		}
		text, err := cluster.ExporterPage(ctx, pod.Name, "/metrics")
		if err != nil {
			return false, err.Error(), nil
		}
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err = parser.TextToMetricFamilies(strings.NewReader(text))
		return err == nil, "", err
	})
	return families
}

// allocation is one line of the exporter's allocation family.
type allocation struct{ node, uuid, namespace, pod, uid, shared string }

// allocations lists which GPUs the pods of this namespace hold, as the exporters say it.
func (s *scene) allocations() (all []allocation) {
	s.Helper()
	for _, node := range s.nodes() {
		for _, m := range s.page(node)[metricname.GPUAllocationInfo].GetMetric() {
			l := map[string]string{}
			for _, p := range m.Label {
				l[p.GetName()] = p.GetValue()
			}
			if l[metricname.Namespace] == s.ns {
				all = append(all, allocation{node, l[metricname.UUID], l[metricname.Namespace], l[metricname.Pod], l[metricname.PodUID], l[metricname.Shared]})
			}
		}
	}
	return all
}

// each gives n pods of a StatefulSet the same value.
func each(name string, n int, value float64) map[string]float64 {
	all := map[string]float64{}
	for i := range n {
		all[fmt.Sprintf("%s-%d", name, i)] = value
	}
	return maps.Clone(all)
}

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/metrics/pkg/apis/external_metrics/v1beta1"

	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/test/rig"
)

// spread makes two busy workers, one on each node, so that what happens to one node is half of the job.
func (s *scene) spread(name string) {
	s.Helper()
	s.pin(95)
	s.workers(name, 2, 1, func(p *corev1.PodSpec) {
		p.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
			MaxSkew: 1, TopologyKey: "kubernetes.io/hostname", WhenUnsatisfiable: corev1.DoNotSchedule,
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
		}}
	})
	s.ready(name, 2)
	s.serves(time.Minute, "", each(name, 2, 95))
	s.everywhere(time.Minute, "has values of both", func(items []v1beta1.ExternalMetricValue, err error) bool { return err == nil && len(items) == 2 })
	s.hpa(name, name, 2, 2, nil)
	s.condition(name, time.Minute, corev1.ConditionTrue)
}

// podOn names the worker on a node.
func (s *scene) podOn(node, app string) string {
	s.Helper()
	pod, err := cluster.PodOn(s.ctx, s.ns, "app="+app, node)
	s.must(err)
	return pod.Name
}

// An exporter is killed and kept away longer than holdFor: held first, then an error that names pod and age; the job never shrinks.
func TestExporterGone(t *testing.T) {
	s := begin(t)
	node := s.nodes()[1]
	for _, n := range s.nodes() {
		_, err := cluster.Kubectl(s.ctx, "label", "node", n, "e2e-exporter=on", "--overwrite")
		s.must(err)
	}
	_, err := cluster.Kubectl(s.ctx, "-n", rig.NodeNamespace, "patch", "daemonset", "capstan-exporter", "-p", `{"spec":{"template":{"spec":{"nodeSelector":{"e2e-exporter":"on"}}}}}`)
	s.must(err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if _, err := cluster.Kubectl(ctx, "-n", rig.NodeNamespace, "patch", "daemonset", "capstan-exporter", "--type=json", "-p", `[{"op":"remove","path":"/spec/template/spec/nodeSelector/e2e-exporter"}]`); err != nil {
			t.Error(err)
		}
		if err := cluster.Ready(ctx, rig.NodeNamespace, "daemonset/capstan-exporter", 90*time.Second); err != nil {
			t.Error(err)
		}
	})
	s.must(cluster.Ready(s.ctx, rig.NodeNamespace, "daemonset/capstan-exporter", 90*time.Second))
	s.spread("web")
	lost := s.podOn(node, "web")
	floor := s.watchFloor("web")

	_, err = cluster.Kubectl(s.ctx, "label", "node", node, "e2e-exporter-")
	s.must(err)
	exporter, err := cluster.PodOn(s.ctx, rig.NodeNamespace, "app.kubernetes.io/name=capstan-exporter", node)
	if err == nil {
		_, err = cluster.Kubectl(s.ctx, "-n", rig.NodeNamespace, "delete", "pod", exporter.Name, "--grace-period=0", "--force")
		s.must(err)
	}
	s.until(30*time.Second, "the last values are held", func(ctx context.Context) (bool, string, error) {
		items, err := cluster.External(ctx, s.ns, rig.Metric, "pod="+lost)
		if err != nil {
			return false, err.Error(), nil
		}
		return len(items) == 1 && items[0].MetricLabels["held"] == "true" && items[0].Value.Value() >= 94, fmt.Sprint(items), nil
	})
	s.condition("web", 2*time.Minute, corev1.ConditionFalse, lost, "s")
	s.everywhere(30*time.Second, "names "+lost+" after holdFor, by 503: the metric is known", func(_ []v1beta1.ExternalMetricValue, err error) bool {
		return err != nil && strings.Contains(err.Error(), lost) && apierrors.IsServiceUnavailable(err)
	})

	_, err = cluster.Kubectl(s.ctx, "label", "node", node, "e2e-exporter=on")
	s.must(err)
	s.condition("web", 2*time.Minute, corev1.ConditionTrue)
	s.serves(time.Minute, "", each("web", 2, 95))
	if replicas, value := floor(); replicas < 2 || value < 90 {
		t.Errorf("smallest size %d, smallest value %.1f; want never below 2 and 90", replicas, value)
	}
}

// A stuck driver: the exporter answers 200, but its snapshot does not move. That is missing, never 0 and never an old value for long.
func TestFrozenExporter(t *testing.T) {
	s := begin(t)
	s.spread("web")
	node := s.nodes()[1]
	lost := s.podOn(node, "web")
	floor := s.watchFloor("web")
	_, err := cluster.Fakegpu(s.ctx, node, "call", "nvmlDeviceGetUtilizationRates", "--latency", "10m")
	s.must(err)
	_, err = cluster.Fakegpu(s.ctx, node, "call", "nvmlDeviceGetSamples", "--latency", "10m")
	s.must(err)
	s.condition("web", 2*time.Minute, corev1.ConditionFalse, lost)
	for _, call := range []string{"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetSamples"} {
		_, err = cluster.Fakegpu(s.ctx, node, "call", call, "--latency", "0s")
		s.must(err)
	}
	// The call that hangs cannot be cancelled: the exporter gets a new process, by its liveness probe or by us.
	exporter, err := cluster.PodOn(s.ctx, rig.NodeNamespace, "app.kubernetes.io/name=capstan-exporter", node)
	s.must(err)
	_, err = cluster.Kubectl(s.ctx, "-n", rig.NodeNamespace, "delete", "pod", exporter.Name, "--grace-period=0", "--force")
	s.must(err)
	s.condition("web", 2*time.Minute, corev1.ConditionTrue)
	if replicas, value := floor(); replicas < 2 || value < 90 {
		t.Errorf("smallest size %d, smallest value %.1f; want never below 2 and 90", replicas, value)
	}
}

// The adapter's pod is killed: the APIService is available again, and nothing was resized.
func TestAdapterKilled(t *testing.T) {
	s := begin(t)
	s.spread("web")
	floor := s.watchFloor("web")
	_, err := cluster.Kubectl(s.ctx, "-n", rig.SystemNamespace, "delete", "pod", "-l", "app.kubernetes.io/name=capstan-adapter", "--grace-period=0", "--force")
	s.must(err)
	s.must(cluster.Ready(s.ctx, rig.SystemNamespace, "deployment/capstan-adapter", 90*time.Second))
	_, err = cluster.Kubectl(s.ctx, "wait", "--for=condition=Available", "apiservice/v1beta1.external.metrics.k8s.io", "--timeout=60s")
	s.must(err)
	s.serves(time.Minute, "", each("web", 2, 95))
	s.condition("web", time.Minute, corev1.ConditionTrue)
	if replicas, value := floor(); replicas < 2 || value < 90 {
		t.Errorf("smallest size %d, smallest value %.1f; want never below 2 and 90", replicas, value)
	}
}

// No NVML library on a node: the exporter stays up and says so, and the node's workers are missing, never 0.
func TestNoLibrary(t *testing.T) {
	s := begin(t)
	s.spread("web")
	node := s.nodes()[1]
	lost := s.podOn(node, "web")
	floor := s.watchFloor("web")
	_, err := cluster.Fakegpu(s.ctx, node, "library", "remove")
	s.must(err)
	t.Cleanup(func() {
		if _, err := cluster.Fakegpu(context.Background(), node, "library", "install"); err != nil {
			t.Error(err)
		}
	})
	exporter, err := cluster.PodOn(s.ctx, rig.NodeNamespace, "app.kubernetes.io/name=capstan-exporter", node)
	s.must(err)
	_, err = cluster.Kubectl(s.ctx, "-n", rig.NodeNamespace, "delete", "pod", exporter.Name)
	s.must(err)

	s.until(time.Minute, "the new exporter says that there is no library", func(ctx context.Context) (bool, string, error) {
		pod, err := cluster.PodOn(ctx, rig.NodeNamespace, "app.kubernetes.io/name=capstan-exporter", node)
		if err != nil {
			return false, err.Error(), nil
		}
		up, there := s.page(node)[metricname.LibraryUp]
		if !there || up.Metric[0].Gauge.GetValue() != 0 {
			return false, fmt.Sprint(up), nil
		}
		text, err := cluster.ExporterPage(ctx, pod.Name, "/readyz")
		if err != nil {
			text += err.Error()
		}
		return strings.Contains(text, "libnvidia-ml.so.1"), text, nil
	})
	s.condition("web", 2*time.Minute, corev1.ConditionFalse, lost)
	exporter, err = cluster.PodOn(s.ctx, rig.NodeNamespace, "app.kubernetes.io/name=capstan-exporter", node)
	s.must(err)
	if n := exporter.Status.ContainerStatuses[0].RestartCount; n != 0 {
		t.Errorf("the exporter without a library restarted %d times, want 0", n)
	}
	if _, there := s.page(node)[metricname.PodGPUBusySeconds]; there {
		t.Errorf("the exporter without a library serves %s", metricname.PodGPUBusySeconds)
	}

	// The library appears: the same process takes it up.
	_, err = cluster.Fakegpu(s.ctx, node, "library", "install")
	s.must(err)
	s.condition("web", 2*time.Minute, corev1.ConditionTrue)
	if replicas, value := floor(); replicas < 2 || value < 90 {
		t.Errorf("smallest size %d, smallest value %.1f; want never below 2 and 90", replicas, value)
	}
}

// A worker with two GPUs is worth their mean, not their sum.
func TestTwoGPUs(t *testing.T) {
	s := begin(t)
	s.workers("web", 1, 2)
	s.ready("web", 1)
	var held []allocation
	s.until(30*time.Second, "the worker holds two GPUs", func(context.Context) (bool, string, error) {
		held = s.allocations()
		return len(held) == 2, fmt.Sprint(held), nil
	})
	for i, percent := range []string{"100", "50"} {
		_, err := cluster.Fakegpu(s.ctx, held[i].node, "set", "--gpu", held[i].uuid, "--utilization", percent)
		s.must(err)
	}
	s.serves(time.Minute, "", map[string]float64{"web-0": 75})
}

// A pod leaves and one with the same name comes: the new one gets its own values, and nothing of the old one.
func TestSameName(t *testing.T) {
	s := begin(t)
	s.pin(95)
	s.workers("web", 2, 1)
	s.ready("web", 2)
	s.serves(time.Minute, "", each("web", 2, 95))
	old, err := cluster.Clients.CoreV1().Pods(s.ns).Get(s.ctx, "web-0", metav1.GetOptions{})
	s.must(err)
	s.must(cluster.Clients.CoreV1().Pods(s.ns).Delete(s.ctx, "web-0", metav1.DeleteOptions{}))
	var uids []string
	s.until(time.Minute, "the exporters know the new web-0 and only it", func(ctx context.Context) (bool, string, error) {
		uids = nil
		for _, a := range s.allocations() {
			if a.pod == "web-0" {
				uids = append(uids, a.uid)
			}
		}
		return len(uids) == 1 && uids[0] != string(old.UID), fmt.Sprint(uids), nil
	})
	s.ready("web", 2)
	s.serves(time.Minute, "held!=true", each("web", 2, 95))
	for _, node := range s.nodes() {
		for name, family := range s.page(node) {
			for _, m := range family.Metric {
				for _, l := range m.Label {
					if l.GetValue() == string(old.UID) {
						t.Errorf("%s still has a series of the pod that left, %s", name, old.UID)
					}
				}
			}
		}
	}
}

// Two pods share one GPU (device ids UUID::N): each shows the device's share, marked as shared.
func TestShared(t *testing.T) {
	s := begin(t)
	node := s.nodes()[1]
	args, err := cluster.Kubectl(s.ctx, "-n", rig.NodeNamespace, "get", "daemonset", "fakegpu", "-o", "jsonpath={.spec.template.spec.containers[0].args}")
	s.must(err)
	_, err = cluster.Kubectl(s.ctx, "-n", rig.NodeNamespace, "patch", "daemonset", "fakegpu", "--type=json", "-p",
		`[{"op":"add","path":"/spec/template/spec/containers/0/args/-","value":"--replicas=16"}]`)
	s.must(err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if _, err := cluster.Kubectl(ctx, "-n", rig.NodeNamespace, "patch", "daemonset", "fakegpu", "--type=json", "-p",
			`[{"op":"replace","path":"/spec/template/spec/containers/0/args","value":`+args+`}]`); err != nil {
			t.Error(err)
		}
		if err := cluster.Install(ctx, "deploy/overlays/simulated", func(string) {}); err != nil {
			t.Error(err)
		}
	})
	s.must(cluster.Ready(s.ctx, rig.NodeNamespace, "daemonset/fakegpu", 90*time.Second))
	s.until(time.Minute, "the node offers shared GPUs", func(ctx context.Context) (bool, string, error) {
		n, err := cluster.Clients.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return false, "", err
		}
		gpus := n.Status.Allocatable["nvidia.com/gpu"]
		return gpus.Value() == 8*16, gpus.String(), nil
	})
	s.pin(70)
	// More pods than GPUs on one node: some two must share, whatever device the kubelet picks.
	const pods = 9
	s.workers("web", pods, 1, func(p *corev1.PodSpec) { p.NodeSelector = map[string]string{"kubernetes.io/hostname": node} })
	s.ready("web", pods)
	s.serves(90*time.Second, "", each("web", pods, 70))
	sharers := map[string][]string{}
	for _, a := range s.allocations() {
		if a.shared != "true" {
			t.Errorf("pod %s holds %s with shared=%q, want true", a.pod, a.uuid, a.shared)
		}
		sharers[a.uuid] = append(sharers[a.uuid], a.pod)
	}
	most := 0
	for uuid, pods := range sharers {
		slices.Sort(pods)
		most = max(most, len(slices.Compact(pods)))
		if strings.Contains(uuid, "::") {
			t.Errorf("uuid %s is a device id of the plugin, not a GPU's", uuid)
		}
	}
	if most < 2 {
		t.Errorf("no GPU is held by two pods: %v", sharers)
	}
	for _, m := range s.page(node)[metricname.PodGPUs].GetMetric() {
		if got := m.Gauge.GetValue(); got != 1 {
			t.Errorf("a pod has %v GPUs, want 1: %v", got, m.Label)
		}
	}
}

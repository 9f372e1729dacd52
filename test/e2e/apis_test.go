package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/capstan-gpu/capstan/test/rig"
)

// with applies the simulated overlay and a component, until the test ends. later undoes what applying the overlay alone does not.
func (s *scene) with(component string, later func(ctx context.Context) error) {
	s.Helper()
	dir := s.TempDir()
	relative := func(path string) string {
		r, err := filepath.Rel(dir, cluster.Path(path))
		s.must(err)
		return r
	}
	overlay := fmt.Sprintf("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [%s]\ncomponents: [%s]\n", relative("deploy/overlays/simulated"), relative("deploy/components/"+component))
	s.must(os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(overlay), 0o644))
	s.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
		defer cancel()
		if err := later(ctx); err != nil {
			s.Error(err)
		}
		if err := cluster.Install(ctx, "deploy/overlays/simulated", func(string) {}); err != nil {
			s.Error(err)
		}
	})
	manifests, err := cluster.Kubectl(s.ctx, "kustomize", dir)
	s.must(err)
	_, err = cluster.KubectlInput(s.ctx, manifests, "apply", "--server-side", "-f", "-")
	s.must(err)
	s.must(cluster.Ready(s.ctx, rig.SystemNamespace, "deployment/capstan-adapter", 3*time.Minute))
}

var customAPIs = []string{"v1beta1.custom.metrics.k8s.io", "v1beta2.custom.metrics.k8s.io"}

// An HPA with a metric of type Pods gets the same values by pod. It treats a pod without a value by itself: the job is not shrunk for it.
func TestPodsMetric(t *testing.T) {
	s := begin(t)
	s.with("custom-metrics", func(ctx context.Context) error {
		_, err := cluster.Kubectl(ctx, append([]string{"delete", "apiservice"}, customAPIs...)...)
		return err
	})
	for _, api := range customAPIs {
		_, err := cluster.Kubectl(s.ctx, "wait", "--for=condition=Available", "apiservice/"+api, "--timeout=60s")
		s.must(err)
	}
	s.pin(95)
	s.workers("web", 2, 1)
	s.ready("web", 2)
	s.serves(time.Minute, "", each("web", 2, 95))
	least, value := int32(2), resource.MustParse("80")
	_, err := cluster.Clients.AutoscalingV2().HorizontalPodAutoscalers(s.ns).Create(s.ctx, &autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web"},
			MinReplicas:    &least, MaxReplicas: 2,
			Metrics: []autoscalingv2.MetricSpec{{Type: autoscalingv2.PodsMetricSourceType, Pods: &autoscalingv2.PodsMetricSource{
				Metric: autoscalingv2.MetricIdentifier{Name: rig.Metric},
				Target: autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: &value},
			}}},
		},
	}, metav1.CreateOptions{})
	s.must(err)
	s.condition("web", time.Minute, corev1.ConditionTrue)
	s.until(time.Minute, "the HPA reads 95 a pod", func(ctx context.Context) (bool, string, error) {
		h, err := cluster.HPA(ctx, s.ns, "web")
		if err != nil || len(h.Status.CurrentMetrics) == 0 || h.Status.CurrentMetrics[0].Pods == nil {
			return false, "no current metric", err
		}
		v := h.Status.CurrentMetrics[0].Pods.Current.AverageValue.AsApproximateFloat64()
		return v > 94 && v < 96, fmt.Sprint(v), nil
	})
	out, err := cluster.Kubectl(s.ctx, "get", "--raw", "/apis/custom.metrics.k8s.io/v1beta2/namespaces/"+s.ns+"/pods/web-0/"+rig.Metric)
	s.must(err)
	if !strings.Contains(out, `"name":"web-0"`) {
		t.Errorf("the metric of one pod: %s", out)
	}
}

// Another product has the external metrics API: applying the bundle says so and takes nothing away, and the component leaves it alone.
func TestForeignAPI(t *testing.T) {
	s := begin(t)
	foreign := `{"apiVersion":"apiregistration.k8s.io/v1","kind":"APIService","metadata":{"name":"v1beta1.external.metrics.k8s.io"},"spec":{"group":"external.metrics.k8s.io","version":"v1beta1","groupPriorityMinimum":100,"versionPriority":100,"service":{"name":"keda-operator-metrics-apiserver","namespace":"keda","port":443}}}`
	restore := func(ctx context.Context) error {
		_, err := cluster.Kubectl(ctx, "delete", "apiservice", "v1beta1.external.metrics.k8s.io")
		return err
	}
	_, err := cluster.Kubectl(s.ctx, "delete", "apiservice", "v1beta1.external.metrics.k8s.io")
	s.must(err)
	s.with("without-external-api", func(ctx context.Context) error {
		if _, err := cluster.Kubectl(ctx, append([]string{"delete", "apiservice"}, customAPIs...)...); err != nil {
			return err
		}
		return restore(ctx)
	})
	_, err = cluster.KubectlInput(s.ctx, foreign, "apply", "--server-side", "--field-manager=keda", "-f", "-")
	s.must(err)

	if out, err := cluster.Kubectl(s.ctx, "apply", "--server-side", "--dry-run=server", "-k", cluster.Path("deploy/overlays/simulated")); err == nil || !strings.Contains(err.Error()+out, "conflict") || !strings.Contains(err.Error()+out, "keda") {
		t.Errorf("applying the bundle over another owner's APIService: %v\n%s\nwant a conflict that names keda", err, out)
	}
	s.pin(95)
	s.workers("web", 1, 1)
	s.ready("web", 1)
	s.until(time.Minute, "the custom metrics API serves the pod", func(ctx context.Context) (bool, string, error) {
		out, err := cluster.Kubectl(ctx, "get", "--raw", "/apis/custom.metrics.k8s.io/v1beta2/namespaces/"+s.ns+"/pods/web-0/"+rig.Metric)
		if err != nil {
			return false, err.Error(), nil
		}
		return strings.Contains(out, `"value":"95`) || strings.Contains(out, `"value":"94`), out, nil
	})
	owner, err := cluster.Kubectl(s.ctx, "get", "apiservice", "v1beta1.external.metrics.k8s.io", "-o", "jsonpath={.spec.service.name} {.spec.caBundle}")
	s.must(err)
	if strings.TrimSpace(owner) != "keda-operator-metrics-apiserver" {
		t.Errorf("the other product's APIService is now %q", owner)
	}
}

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/capstan-gpu/capstan/test/rig"
)

// The article's HPA, as deploy/examples/mnist-training ships it, scales mnist-training-worker up on load and down after it.
func TestArticle(t *testing.T) {
	s := begin(t)
	const ns = "training"
	s.must(cluster.ApplyOverlay(s.ctx, "deploy/examples/mnist-training"))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if t.Failed() {
			t.Log(cluster.Describe(ctx, ns))
		}
		if _, err := cluster.Kubectl(ctx, "delete", "namespace", ns, "--timeout=90s"); err != nil {
			t.Error(err)
		}
	})
	size := func(limit time.Duration, what string, ok func(workers int, average float64) bool) {
		t.Helper()
		s.until(limit, what, func(ctx context.Context) (bool, string, error) {
			hpa, err := cluster.HPA(ctx, ns, rig.ArticleHPA)
			if err != nil {
				return false, err.Error(), nil
			}
			set, err := cluster.Clients.AppsV1().StatefulSets(ns).Get(ctx, rig.WorkerSet, metav1.GetOptions{})
			if err != nil {
				return false, err.Error(), nil
			}
			average, read := rig.Average(hpa)
			_, _, message := rig.Condition(hpa, "ScalingActive")
			state := fmt.Sprintf("%d workers ready, %d asked for, HPA read %.0f (%v): %s", set.Status.ReadyReplicas, hpa.Status.DesiredReplicas, average, read, message)
			return read && set.Status.ReadyReplicas == hpa.Status.DesiredReplicas && ok(int(set.Status.ReadyReplicas), average), state, nil
		})
	}
	recorded := s.record()
	size(2*time.Minute, "two workers keep up", func(workers int, average float64) bool { return workers == 2 && average > 30 && average < 80 })

	s.must(cluster.SetRate(s.ctx, ns, 300))
	size(3*time.Minute, "the HPA goes up on load", func(workers int, _ float64) bool { return workers >= 4 })

	// Applying again, while the HPA has scaled up, changes nothing.
	before, err := cluster.Clients.AppsV1().StatefulSets(ns).Get(s.ctx, rig.WorkerSet, metav1.GetOptions{})
	s.must(err)
	for _, overlay := range []string{"deploy/examples/mnist-training", "deploy/overlays/simulated"} {
		diff, err := cluster.Kubectl(s.ctx, "diff", "--server-side", "-k", cluster.Path(overlay))
		if err != nil || diff != "" {
			t.Errorf("applying %s again would change something: %v\n%s", overlay, err, diff)
		}
		s.must(cluster.ApplyOverlay(s.ctx, overlay))
	}
	after, err := cluster.Clients.AppsV1().StatefulSets(ns).Get(s.ctx, rig.WorkerSet, metav1.GetOptions{})
	s.must(err)
	if *after.Spec.Replicas < *before.Spec.Replicas || after.Generation != before.Generation && *after.Spec.Replicas == *before.Spec.Replicas {
		t.Errorf("applying again changed the StatefulSet: replicas %d → %d, generation %d → %d", *before.Spec.Replicas, *after.Spec.Replicas, before.Generation, after.Generation)
	}

	s.must(cluster.SetRate(s.ctx, ns, 100))
	size(3*time.Minute, "the HPA comes back", func(workers int, _ float64) bool { return workers == 2 })

	s.dashboards(recorded(), ns, rig.WorkerSet)

	stream, err := cluster.Stream(s.ctx, ns)
	s.must(err)
	if stream.Lost != 0 || stream.Completed == 0 || stream.Completed+stream.Backlog+stream.Leased != stream.Offered {
		t.Errorf("the stream's account does not add up: %+v", stream)
	}
}

// "Above 80 % for five minutes", as the article says it, is an HPA that this API server takes as it is.
func TestFiveMinutes(t *testing.T) {
	s := begin(t)
	out, err := cluster.Kubectl(s.ctx, "-n", s.ns, "apply", "--server-side", "--dry-run=server", "-f", cluster.Path("deploy/examples/mnist-training/hpa-five-minutes.yaml"), "-o", "jsonpath={.spec.behavior.scaleUp}")
	s.must(err)
	if !strings.Contains(out, `"stabilizationWindowSeconds":300`) || !strings.Contains(out, `"tolerance":"0"`) {
		t.Errorf("scaleUp = %s; want a window of 300 s and tolerance 0", out)
	}
}

// The HPA adds up the items and divides by replicas: four workers at 95 % are 95 in its status, and five workers asked for.
func TestSumNotAverage(t *testing.T) {
	s := begin(t)
	s.pin(95)
	s.workers("web", 4, 1)
	s.ready("web", 4)
	s.serves(time.Minute, "", each("web", 4, 95))
	s.hpa("web", "web", 4, 5, nil)
	s.until(time.Minute, "the HPA reads 95 and asks for 5", func(ctx context.Context) (bool, string, error) {
		h, err := cluster.HPA(ctx, s.ns, "web")
		if err != nil {
			return false, "", err
		}
		average, ok := rig.Average(h)
		if h.Status.DesiredReplicas > 5 {
			return false, "", fmt.Errorf("it asks for %d", h.Status.DesiredReplicas)
		}
		return ok && average > 94 && average < 96 && h.Status.DesiredReplicas == 5, fmt.Sprintf("read %.1f, desired %d", average, h.Status.DesiredReplicas), nil
	})
	s.ready("web", 5)
}

// Two HPAs without a selector in one namespace are an error that says what to add; with it, each reads its own workload.
func TestTwoWorkloads(t *testing.T) {
	s := begin(t)
	s.pin(60)
	s.workers("left", 2, 1)
	s.workers("right", 1, 1)
	s.ready("left", 2)
	s.ready("right", 1)
	s.hpa("left", "left", 2, 5, nil)
	s.hpa("right", "right", 1, 5, nil)
	s.condition("left", time.Minute, corev1.ConditionFalse, "selector", "workload", "left", "right")
	s.condition("right", time.Minute, corev1.ConditionFalse, "selector", "workload")

	for _, name := range []string{"left", "right"} {
		patch := fmt.Sprintf(`[{"op":"add","path":"/spec/metrics/0/external/metric/selector","value":{"matchLabels":{"workload":%q}}}]`, name)
		_, err := cluster.Kubectl(s.ctx, "-n", s.ns, "patch", "hpa", name, "--type=json", "-p", patch)
		s.must(err)
	}
	s.serves(time.Minute, "workload=left", each("left", 2, 60))
	s.serves(time.Minute, "workload=right", each("right", 1, 60))
	s.condition("left", time.Minute, corev1.ConditionTrue)
	s.condition("right", time.Minute, corev1.ConditionTrue)
}

// A notebook with a GPU beside the article's job changes nothing.
func TestNotebook(t *testing.T) {
	s := begin(t)
	s.pin(60)
	s.workers("web", 2, 1)
	s.hpa("web", "web", 2, 5, nil)
	_, err := cluster.Clients.CoreV1().Pods(s.ns).Create(s.ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "notebook"}, Spec: workerPod(1)}, metav1.CreateOptions{})
	s.must(err)
	s.ready("web", 2)
	s.until(time.Minute, "the exporters see the notebook's GPU too", func(context.Context) (bool, string, error) {
		all := s.allocations()
		return len(all) == 3, fmt.Sprint(all), nil
	})
	s.serves(time.Minute, "", each("web", 2, 60))
	s.condition("web", time.Minute, corev1.ConditionTrue)
	if got := s.replicas("web"); got != 2 {
		t.Errorf("replicas %d, want 2", got)
	}
}

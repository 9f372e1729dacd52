package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/capstan-gpu/capstan/trainer/agent"
	"github.com/capstan-gpu/capstan/trainer/reference"
)

// The job of TestRing.
const (
	ringSteps = 3000
	ringBatch = 64
)

// ring applies the example of a ring to the scene's namespace, with other arguments, and gives it its size.
func (s *scene) ring(replicas int, args ...string) {
	s.Helper()
	dir := s.TempDir()
	example, err := filepath.Rel(dir, cluster.Path("deploy/examples/ring"))
	s.must(err)
	list, err := json.Marshal(append([]string{"ring"}, args...))
	s.must(err)
	audience := agent.Audience(s.ns, "training")
	overlay := fmt.Sprintf(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: %s
resources: [%s]
patches:
  - target: {kind: StatefulSet}
    patch: |
      - {op: replace, path: /spec/template/spec/containers/0/args, value: %s}
      - {op: replace, path: /spec/template/spec/volumes/0/projected/sources/0/serviceAccountToken/audience, value: %s}
  - target: {kind: Namespace}
    patch: |
      {$patch: delete, apiVersion: v1, kind: Namespace, metadata: {name: elastic}}
`, s.ns, example, list, audience)
	s.must(os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(overlay), 0o644))
	_, err = cluster.Kubectl(s.ctx, "apply", "--server-side", "-k", dir)
	s.must(err)
	s.scale("training", replicas)
}

// worker is what a worker says of itself.
func (s *scene) worker(ctx context.Context, pod string) (agent.Status, error) {
	var status agent.Status
	text, err := cluster.Proxy(ctx, s.ns, pod, "9402", "status")
	if err == nil {
		err = json.Unmarshal([]byte(text), &status)
	}
	return status, err
}

// world waits until a worker's ring has so many members and is some steps beyond a step.
func (s *scene) world(pod string, members int, beyond int64) (status agent.Status) {
	s.Helper()
	s.until(2*time.Minute, fmt.Sprintf("the ring has %d members", members), func(ctx context.Context) (_ bool, _ string, err error) {
		if status, err = s.worker(ctx, pod); err != nil {
			return false, err.Error(), nil
		}
		return status.Phase == "running" && status.World == members && status.Step > beyond, fmt.Sprintf("%+v", status), nil
	})
	return status
}

func (s *scene) scale(name string, replicas int) {
	s.Helper()
	_, err := cluster.Kubectl(s.ctx, "-n", s.ns, "scale", "statefulset", name, fmt.Sprint("--replicas=", replicas))
	s.must(err)
}

// A job that really trains goes from 2 to 4 to 3 workers and loses one, on real pods. Nothing is skipped or counted twice, no process of
// the survivors starts again, and the model in the end is the same, bit for bit, as that of a job of one worker. Then it sets itself to 0.
func TestRing(t *testing.T) {
	s := begin(t)
	s.ring(2, fmt.Sprint("--steps=", ringSteps), fmt.Sprint("--batch=", ringBatch), "--step-takes=60ms", "--change-interval=2s", "--settle=500ms")
	first := s.world("training-0", 2, 20)
	pods := func() map[string]string { // by name: UID and restarts
		list, err := cluster.Clients.CoreV1().Pods(s.ns).List(s.ctx, metav1.ListOptions{LabelSelector: "app=training"})
		s.must(err)
		all := map[string]string{}
		for _, p := range list.Items {
			if len(p.Status.ContainerStatuses) > 0 {
				all[p.Name] = fmt.Sprintf("%s, %d restarts", p.UID, p.Status.ContainerStatuses[0].RestartCount)
			}
		}
		return all
	}
	before := pods()
	log := s.follow("training-0")

	s.scale("training", 4)
	up := s.world("training-0", 4, first.Step)
	s.scale("training", 3)
	down := s.world("training-0", 3, up.Step)
	if up.LostSteps+down.LostSteps != 0 {
		t.Errorf("steps lost by planned changes: %d, then %d; want none", up.LostSteps, down.LostSteps)
	}
	_, err := cluster.Kubectl(s.ctx, "-n", s.ns, "delete", "pod", "training-1", "--grace-period=0", "--force")
	s.must(err)
	var lost agent.Status
	s.until(2*time.Minute, "the ring goes on without the lost worker, or with its successor", func(ctx context.Context) (_ bool, _ string, err error) {
		if lost, err = s.worker(ctx, "training-0"); err != nil {
			return false, err.Error(), nil
		}
		return lost.Phase == "running" && lost.Number > down.Number, fmt.Sprintf("%+v", lost), nil
	})
	again := s.world("training-0", 3, lost.Step)
	t.Logf("pauses: up %.0f ms, down %.0f ms, loss %.0f ms (%d steps lost); at step %d of %d", 1e3*up.Pause, 1e3*down.Pause, 1e3*lost.Pause, lost.LostSteps, again.Step, ringSteps)
	if again.LostSteps > 1 {
		t.Errorf("%d steps lost by one loss, want at most 1", again.LostSteps)
	}
	if after := pods(); after["training-0"] != before["training-0"] {
		t.Errorf("training-0 was %s, and is %s", before["training-0"], after["training-0"])
	}

	s.until(4*time.Minute, "the job is done and sets itself to 0", func(ctx context.Context) (bool, string, error) {
		set, err := cluster.Clients.AppsV1().StatefulSets(s.ns).Get(ctx, "training", metav1.GetOptions{})
		if err != nil {
			return false, "", err
		}
		return *set.Spec.Replicas == 0 && set.Status.Replicas == 0, fmt.Sprintf("%d wished, %d there", *set.Spec.Replicas, set.Status.Replicas), nil
	})
	record, err := cluster.Kubectl(s.ctx, "-n", s.ns, "get", "configmap", "training-ring", "-o", "jsonpath={.data}")
	s.must(err)
	want := reference.Alone(ringBatch, ringSteps, 2)
	said := regexp.MustCompile(`msg="trained to the end" step=(\d+) samples=(\d+) once=(\w+) hash=(\w+)`).FindStringSubmatch(log())
	if said == nil {
		t.Fatalf("training-0 does not say what it ended with; the record is %s; its log:\n%s", record, log())
	}
	if got := fmt.Sprint(said[1:]); got != fmt.Sprint([]string{fmt.Sprint(ringSteps), fmt.Sprint(ringSteps * ringBatch), "true", fmt.Sprintf("%016x", want.Hash)}) {
		t.Errorf("training-0 ends with steps, samples, each once, hash of %s; a job of one worker with %d, %d, %t, %016x", got, want.Step, want.Samples, want.Once, want.Hash)
	}
}

// follow keeps what a pod logs, also after the pod is gone.
func (s *scene) follow(pod string) (log func() string) {
	var (
		mu   sync.Mutex
		text bytes.Buffer
	)
	ctx, cancel := context.WithCancel(s.ctx)
	stream, err := cluster.Clients.CoreV1().Pods(s.ns).GetLogs(pod, &corev1.PodLogOptions{Follow: true}).Stream(ctx)
	s.must(err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer stream.Close()
		lines := bufio.NewScanner(stream)
		for lines.Scan() {
			mu.Lock()
			fmt.Fprintln(&text, lines.Text())
			mu.Unlock()
		}
	}()
	s.Cleanup(func() { cancel(); <-done })
	return func() string {
		mu.Lock()
		defer mu.Unlock()
		return text.String()
	}
}

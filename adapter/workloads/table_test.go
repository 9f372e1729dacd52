package workloads

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"pgregory.net/rapid"

	"github.com/capstan-gpu/capstan/rules"
)

var now = time.Unix(1_800_000_000, 0)

// world makes a table of one metric, gpu_utilization, and of steps, which is per workload. A job is written
// "namespace/name 80 90" with its pods' values, "namespace/name error" or "namespace/name empty"; an HPA
// "namespace/name target", with a selector after it if it has one.
func world(t testing.TB, jobs, hpas []string) *Table {
	t.Helper()
	var sets []StatefulSet
	var pods []Pod
	answers := map[string]rules.Answer{}
	for _, line := range jobs {
		fields := strings.Fields(line)
		namespace, name, _ := strings.Cut(fields[0], "/")
		uid := fields[0]
		sets = append(sets, StatefulSet{namespace, name, uid, 1, ""})
		var a rules.Answer
		for i, f := range fields[1:] {
			pod := fmt.Sprintf("%s-%d", name, i)
			node := fmt.Sprintf("node-%d", i)
			switch f {
			case "error":
				a.Err = fmt.Errorf("pod %s: %w for 62s", pod, rules.ErrMissing)
			case "empty":
				a.Err = rules.ErrNoPods
				continue
			default:
				var v float64
				fmt.Sscan(strings.TrimSuffix(f, "h"), &v)
				a.Items = append(a.Items, rules.Item{Pod: pod, PodUID: uid + f, Workload: name, Node: node, Value: v, At: now, Held: strings.HasSuffix(f, "h"), Labels: map[string]string{"gpu_model": "NVIDIA H200"}})
			}
			pods = append(pods, Pod{namespace, uid, LabelsOf(map[string]string{"app": name}), rules.Pod{UID: pod, Name: pod, Node: node, GPUs: 1}})
		}
		answers[uid] = a
	}
	var asks []HPA
	for _, line := range hpas {
		fields := strings.SplitN(line, " ", 3)
		namespace, name, _ := strings.Cut(fields[0], "/")
		ask := Ask{Metric: "gpu_utilization"}
		if len(fields) == 3 {
			ask.Selector, _ = labels.Parse(fields[2])
		}
		kind, target, ok := strings.Cut(fields[1], "/")
		if !ok {
			kind, target = "StatefulSet", kind
		}
		asks = append(asks, HPA{namespace, name, kind, target, []Ask{ask}, nil})
	}
	list := []rules.Rule{{Metric: "gpu_utilization", Window: time.Minute, Per: rules.PerPod}, {Metric: "Steps", Per: rules.PerWorkload}}
	view := Build(asks, sets, pods, []string{"gpu_utilization", "steps"})
	all := make([][]rules.Answer, 2)
	for _, w := range view.Workloads {
		a := answers[w.UID]
		all[0] = append(all[0], a)
		if a.Err == nil {
			a.Items = []rules.Item{{Workload: w.Name, Value: 7, At: now}}
		}
		all[1] = append(all[1], a)
	}
	return NewTable(now, view, list, all, func(p rules.Pod) string {
		if strings.HasPrefix(p.Name, "known") {
			return "NVIDIA H200"
		}
		return ""
	})
}

func TestLookup(t *testing.T) {
	f := func(table *Table, namespace, selector, want string) {
		t.Helper()
		s, err := labels.Parse(selector)
		if err != nil {
			t.Fatal(err)
		}
		items, _, err := table.Lookup(namespace, "gpu_utilization", s)
		var got []string
		for _, it := range items {
			got = append(got, fmt.Sprintf("%s=%v", it.Labels["pod"], it.Value))
		}
		text := strings.Join(got, " ")
		if err != nil {
			text = "error: " + err.Error()
		}
		if (err == nil) != (len(items) > 0) {
			t.Errorf("%s %q: %d items with error %v: want exactly one of both", namespace, selector, len(items), err)
		}
		if text != want {
			t.Errorf("%s %q:\n got %s\nwant %s", namespace, selector, text, want)
		}
	}

	// The article: one job, one HPA without a selector, and a job that nobody scales.
	article := world(t, []string{"train/mnist-training-worker 90 95", "train/notebook-set 3"}, []string{"train/tf-worker-hpa mnist-training-worker"})
	f(article, "train", "", "mnist-training-worker-0=90 mnist-training-worker-1=95")
	f(article, "train", "workload=notebook-set", "notebook-set-0=3")
	f(article, "other", "", "error: nothing to measure: no StatefulSet in this namespace has pods with GPUs")
	f(article, "other", "workload=mnist-training-worker", "error: nothing to measure: the selector workload=mnist-training-worker selects no worker; this namespace has no workload")

	// Two of each.
	two := world(t, []string{"ns/a 1 2", "ns/b 3"}, []string{"ns/hpa-b b", "ns/hpa-a a", "else/x a"})
	f(two, "ns", "", "error: which workload is meant is not clear: two HorizontalPodAutoscalers, hpa-a (scales a) and hpa-b (scales b), ask for gpu_utilization without a selector; add to each its own, such as selector: {matchLabels: {workload: a}}")
	f(two, "ns", "workload=a", "a-0=1 a-1=2")
	f(two, "ns", "workload in (a,b)", "a-0=1 a-1=2 b-0=3")
	f(two, "ns", "workload notin (a)", "b-0=3")
	f(two, "ns", "workload!=a,pod=b-0", "b-0=3")
	f(two, "ns", "pod,!absent", "a-0=1 a-1=2 b-0=3")
	f(two, "ns", "node=node-0,gpu_model=NVIDIA-H200", "a-0=1 b-0=3")
	f(two, "ns", "held=true", "error: nothing to measure: the selector held=true selects no worker; the workloads of this namespace: a, b")
	f(two, "ns", "pod=a.0", "error: nothing to measure: the selector pod=a.0 selects no worker; the workloads of this namespace: a, b")

	// One of the HPAs has a selector: the other needs none.
	f(world(t, []string{"ns/a 1", "ns/b 3"}, []string{"ns/hpa-b b workload=b", "ns/hpa-a a"}), "ns", "", "a-0=1")
	// Two HPAs that scale the same are no question of which.
	f(world(t, []string{"ns/a 1", "ns/b 3"}, []string{"ns/hpa-b a", "ns/hpa-a a"}), "ns", "", "a-0=1")
	// No HPA: for people.
	f(world(t, []string{"ns/a 1", "other/b 3"}, nil), "ns", "", "a-0=1")
	f(world(t, []string{"ns/a 1", "ns/b 3"}, nil), "ns", "", "error: which workload is meant is not clear: the workloads of this namespace: a, b, and no HorizontalPodAutoscaler asks for gpu_utilization; name one with a selector, such as workload=a")
	// What an HPA scales is not there, or is something else.
	f(world(t, []string{"ns/a 1"}, []string{"ns/h gone"}), "ns", "", "error: nothing to measure: HorizontalPodAutoscaler h scales StatefulSet gone, which does not exist")
	f(world(t, []string{"ns/a 1"}, []string{"ns/h Deployment/web"}), "ns", "", "error: nothing to measure: HorizontalPodAutoscaler h scales Deployment web, but only a StatefulSet is a workload")

	// Errors of workloads.
	sick := world(t, []string{"ns/a 1 2h", "ns/b error", "ns/c empty", "ns/known error"}, []string{"ns/h b"})
	f(sick, "ns", "", "error: StatefulSet b: pod b-0: missing for 62s")
	f(sick, "ns", "workload=a", "a-0=1 a-1=2")
	f(sick, "ns", "workload=a,held=false", "a-0=1")
	f(sick, "ns", "workload=b", "error: StatefulSet b: pod b-0: missing for 62s")
	f(sick, "ns", "workload in (a,b)", "error: StatefulSet b: pod b-0: missing for 62s")
	f(sick, "ns", "workload in (b,c)", "error: StatefulSet b: pod b-0: missing for 62s; StatefulSet c: no pods")
	f(sick, "ns", "pod=b-0", "error: StatefulSet b: pod b-0: missing for 62s")
	f(sick, "ns", "pod=b-7", "error: nothing to measure: the selector pod=b-7 selects no worker; the workloads of this namespace: a, b, c, known")
	f(sick, "ns", "workload=b,held=true", "error: StatefulSet b: pod b-0: missing for 62s")
	f(sick, "ns", "node=node-1", "a-1=2")
	f(sick, "ns", "gpu_model=NVIDIA-H200,workload!=known", "error: StatefulSet b: pod b-0: missing for 62s") // b's model is not known: it could be meant
	f(sick, "ns", "gpu_model=NVIDIA-A100,workload!=b", "error: nothing to measure: the selector gpu_model=NVIDIA-A100,workload!=b selects no worker; the workloads of this namespace: a, b, c, known")

	_, _, err := sick.Lookup("ns", "gpu_utilisation", nil)
	if !errors.Is(err, ErrUnknownMetric) || !strings.HasSuffix(err.Error(), "there are gpu_utilization, steps") {
		t.Errorf("unknown metric: %v", err)
	}
	items, _, err := sick.Lookup("ns", "STEPS", labels.SelectorFromSet(labels.Set{"workload": "a"}))
	if err != nil || len(items) != 1 || labels.FormatLabels(items[0].Labels) != "held=false,workload=a" {
		t.Errorf("per workload: %v %v", items, err)
	}
}

// TestNamespaceIsAWall: whatever the selector, nothing of another namespace comes back or is named.
func TestNamespaceIsAWall(t *testing.T) {
	table := world(t, []string{"mine/job 1 2", "mine/sick error", "theirs/secret 3", "theirs/hidden error"}, []string{"mine/h job", "theirs/secret-hpa secret"})
	rapid.Check(t, func(t *rapid.T) {
		text := selectors.Draw(t, "selector")
		selector, err := labels.Parse(text)
		if err != nil {
			t.Skip()
		}
		check(t, table, selector)
	})
}

var selectors = rapid.Custom(func(t *rapid.T) string {
	var parts []string
	for range rapid.IntRange(0, 3).Draw(t, "n") {
		key := rapid.SampledFrom([]string{"pod", "workload", "node", "gpu_model", "held", "namespace", "absent"}).Draw(t, "key")
		value := rapid.SampledFrom([]string{"job", "sick", "secret", "hidden", "job-0", "secret-0", "node-0", "true", "theirs", "", "NVIDIA-H200"})
		parts = append(parts, rapid.OneOf(
			rapid.Just(key), rapid.Just("!"+key),
			rapid.Map(value, func(v string) string { return key + "=" + v }),
			rapid.Map(value, func(v string) string { return key + "!=" + v }),
			rapid.Map(rapid.SliceOfN(value, 1, 3), func(v []string) string { return key + " in (" + strings.Join(v, ",") + ")" }),
			rapid.Map(rapid.SliceOfN(value, 1, 3), func(v []string) string { return key + " notin (" + strings.Join(v, ",") + ")" }),
		).Draw(t, "part"))
	}
	return strings.Join(parts, ",")
})

// check asks one table for one selector and holds the answer against what a plain scan says.
func check(t interface{ Errorf(string, ...any) }, table *Table, selector labels.Selector) {
	items, _, err := table.Lookup("mine", "gpu_utilization", selector)
	if (err == nil) == (len(items) == 0) {
		t.Errorf("%s: %d items and error %v: want exactly one of both", selector, len(items), err)
	}
	for _, it := range items {
		if it.Labels["workload"] != "job" {
			t.Errorf("%s: item %v", selector, it.Labels)
		}
		if !selector.Matches(it.Labels) {
			t.Errorf("%s: selected %v", selector, it.Labels)
		}
	}
	if err != nil && !strings.Contains(selector.String(), "secret") && strings.Contains(err.Error(), "secret") ||
		err != nil && !strings.Contains(selector.String(), "hidden") && strings.Contains(err.Error(), "hidden") {
		t.Errorf("%s: an error names another namespace's workload: %v", selector, err)
	}
}

func FuzzSelector(f *testing.F) {
	for _, s := range []string{"", "workload=job", "pod in (job-0,secret-0)", "!held", "gpu_model notin (a),held", "workload=secret", "a>1", "pod=.*", "x in ("} {
		f.Add(s)
	}
	table := world(f, []string{"mine/job 1 2", "mine/sick error", "theirs/secret 3", "theirs/hidden error"}, []string{"mine/h job", "theirs/secret-hpa secret"})
	f.Fuzz(func(t *testing.T, text string) {
		selector, err := labels.Parse(text)
		if err != nil {
			return
		}
		check(t, table, selector)
	})
}

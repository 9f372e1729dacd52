package env

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// job is the job of the tests: with those members, of which this is the one of a rank.
func job(rank int, members ...int) Process {
	return Process{StatefulSet: "tw", Namespace: "ml", Service: "tw", Generation: ring.Generation{Term: 3, Count: 7}, Step: 1812, Members: members, Rank: rank}
}

func local(p Process, processes, rank int) Process {
	p.LocalProcesses, p.LocalRank = processes, rank
	return p
}

func roles(p Process, r ...Role) Process {
	p.Roles = r
	return p
}

// apart is a job whose roles are StatefulSets of their own, as the TFJob operator makes them; p is a pod of one of them.
func apart(statefulSet string, rank int, members ...int) Process {
	p := job(rank, members...)
	p.StatefulSet, p.Service = statefulSet, statefulSet
	p.Roles = []Role{
		{Type: Chief, StatefulSet: "c", Ordinals: []int{0}},
		{Type: PS, StatefulSet: "ps", Ordinals: []int{0, 1}},
		{Type: Worker, StatefulSet: "tw", Ordinals: []int{0, 1, 4}},
		{Type: Evaluator, StatefulSet: "ev", Ordinals: []int{0}},
	}
	return p
}

var goldens = []struct {
	name      string
	about     string
	framework Framework
	process   Process
}{
	{"pytorch-1", "one worker", PyTorch, job(0, 0)},
	{"pytorch-3-rank2", "three workers, one GPU each, ordinal 1 is missing", PyTorch, job(2, 0, 2, 3)},
	{"pytorch-11-rank10", "eleven workers: ordinal 10 is the last, not the third", PyTorch, job(10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)},
	{"pytorch-2x4-rank1-local3", "two workers with four processes each: the last of all", PyTorch, local(job(1, 0, 1), 4, 3)},
	{"pytorch-hosts", "two workers whose addresses are known", PyTorch, func() Process {
		p := job(0, 0, 1)
		p.Hosts = []string{"fd00::17", "10.1.0.4"}
		return p
	}()},
	{"jax-1", "one worker", JAX, job(0, 0)},
	{"jax-3-rank1", "three workers with one process each", JAX, job(1, 0, 1, 5)},
	{"jax-2x2-rank1-local0", "two workers with two processes each", JAX, local(job(1, 0, 1), 2, 0)},
	{"jax-domain", "two workers, with the cluster's domain", JAX, func() Process {
		p := job(0, 0, 1)
		p.ClusterDomain = "cluster.local"
		return p
	}()},
	{"jax-hosts", "two workers whose addresses are known", JAX, func() Process {
		p := job(1, 0, 1)
		p.Hosts = []string{"fd00::17", "fd00::18"}
		return p
	}()},
	{"tensorflow-1", "one worker: not distributed", TensorFlow, job(0, 4)},
	{"tensorflow-3-worker1", "MultiWorkerMirroredStrategy without a chief", TensorFlow, job(1, 0, 1, 2)},
	{"tensorflow-3-worker2-hole", "the same, ordinal 1 is missing: the address is the ordinal's, the index is dense", TensorFlow, job(2, 0, 2, 10)},
	{"tensorflow-chief", "MultiWorkerMirroredStrategy with a chief: it", TensorFlow, roles(job(0, 0, 1, 2), Role{Type: Chief, Ordinals: []int{0}}, Role{Type: Worker, Ordinals: []int{1, 2}})},
	{"tensorflow-chief-worker0", "the same: its first worker, whose rank is 1", TensorFlow, roles(job(1, 0, 1, 2), Role{Type: Chief, Ordinals: []int{0}}, Role{Type: Worker, Ordinals: []int{1, 2}})},
	{"tensorflow-ps-worker2", "the article's TFJob, three workers and a parameter server, in one StatefulSet: the last worker", TensorFlow, roles(job(3, 0, 1, 2, 3), Role{Type: PS, Ordinals: []int{0}}, Role{Type: Worker, Ordinals: []int{1, 2, 3}})},
	{"tensorflow-apart-chief", "parameter servers, each role a StatefulSet: the chief", TensorFlow, apart("c", 0, 0)},
	{"tensorflow-apart-ps1", "the same: the second parameter server", TensorFlow, apart("ps", 1, 0, 1)},
	{"tensorflow-apart-worker2", "the same: the third worker, of ordinal 4", TensorFlow, apart("tw", 2, 0, 1, 4)},
	{"tensorflow-apart-evaluator", "the same: the evaluator, who is not in the cluster", TensorFlow, apart("ev", 0, 0)},
	{"tensorflow-worker-evaluator", "one worker and an evaluator: two tasks, so it is distributed", TensorFlow, roles(job(0, 0, 1), Role{Type: Worker, Ordinals: []int{0}}, Role{Type: Evaluator, Ordinals: []int{1}})},
}

func render(about string, e Environment) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n", about)
	for _, part := range []struct {
		verb  string
		lines []string
	}{{"set", e.Set}, {"default", e.Defaults}, {"unset", e.Unset}} {
		for _, line := range part.lines {
			fmt.Fprintf(&b, "%s %s\n", part.verb, line)
		}
	}
	return b.String()
}

// TestGolden compares with testdata/*.golden. -update rewrites them; reading the diff is the review.
func TestGolden(t *testing.T) {
	files := map[string]bool{}
	for _, g := range goldens {
		t.Run(g.name, func(t *testing.T) {
			e, err := Write(g.process, g.framework)
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join("testdata", g.name+".golden")
			files[file] = true
			got := render(g.about, e)
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	if there, _ := filepath.Glob("testdata/*.golden"); len(files) == len(goldens) && len(there) != len(files) {
		t.Errorf("%d golden files, want %d: delete those that no case has", len(there), len(files))
	}
}

// All frameworks at once are the ring's variables and each framework's.
func TestAllFrameworks(t *testing.T) {
	p := job(1, 0, 1, 2)
	all, err := Write(p, Frameworks()...)
	if err != nil {
		t.Fatal(err)
	}
	none, err := Write(p)
	if err != nil {
		t.Fatal(err)
	}
	want := none
	for _, f := range Frameworks() {
		one, err := Write(p, f)
		if err != nil {
			t.Fatal(err)
		}
		want.Set = append(want.Set, one.Set[len(none.Set):]...)
		want.Defaults = append(want.Defaults, one.Defaults...)
		want.Unset = append(want.Unset, one.Unset...)
	}
	if diff := cmp.Diff(want, all); diff != "" {
		t.Errorf("(-each +all):\n%s", diff)
	}
	names := map[string]bool{}
	for _, pair := range all.Set {
		name, _, _ := strings.Cut(pair, "=")
		if names[name] {
			t.Errorf("%s is set twice", name)
		}
		names[name] = true
	}
}

func TestApply(t *testing.T) {
	e := Environment{Set: []string{"RANK=1", "EMPTY="}, Defaults: []string{"OMP_NUM_THREADS=1", "T=1"}, Unset: []string{"TF_CONFIG"}}
	inherited := []string{"PATH=/bin", "RANK=0", "TF_CONFIG={}", "RANKS=9", "OMP_NUM_THREADS=8", "RANK=7", "A=b=c"}
	before := slices.Clone(inherited)
	want := []string{"PATH=/bin", "RANKS=9", "OMP_NUM_THREADS=8", "A=b=c", "T=1", "RANK=1", "EMPTY="}
	if diff := cmp.Diff(want, e.Apply(inherited)); diff != "" {
		t.Errorf("Apply (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(before, inherited); diff != "" {
		t.Errorf("what it was given has changed:\n%s", diff)
	}
	if got := (Environment{}).Apply(nil); len(got) != 0 {
		t.Errorf("nothing applied to nothing is %q", got)
	}
}

func TestRefuses(t *testing.T) {
	refuses := func(change func(*Process), f Framework, want ...string) {
		t.Helper()
		p := job(1, 0, 1, 2)
		change(&p)
		e, err := Write(p, f)
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%v, want %q in it", err, w)
			}
		}
		if len(e.Set)+len(e.Defaults)+len(e.Unset) > 0 {
			t.Errorf("there is an environment beside the error %v", err)
		}
	}
	refuses(func(p *Process) { p.StatefulSet = "" }, JAX, `StatefulSet ""`, "set it to the object's name")
	refuses(func(p *Process) { p.Namespace = "ML" }, JAX, `Namespace "ML"`, "a-z, 0-9 and -")
	refuses(func(p *Process) { p.Service = "tw.ml" }, JAX, `Service "tw.ml"`)
	refuses(func(p *Process) { p.Service = "tw\nLD_PRELOAD=x" }, JAX, `Service "tw\nLD_PRELOAD=x"`)
	refuses(func(p *Process) { p.StatefulSet = strings.Repeat("a", 62) }, JAX, "name of 64 bytes", "at most 63", "shorter name")
	refuses(func(p *Process) { p.ClusterDomain = "cluster..local" }, JAX, `ClusterDomain "cluster..local"`, "leave it out")
	refuses(func(p *Process) { p.Generation = ring.Generation{} }, JAX, "Generation 0.0")
	refuses(func(p *Process) { p.Step = -1 }, JAX, "Step -1", "0 or more")
	refuses(func(p *Process) { p.Members = nil }, JAX, "Members has 0 ordinals", "1 to 4096")
	refuses(func(p *Process) { p.Members = []int{0, 2, 1} }, JAX, "Members 1 at rank 2", "sort them as numbers")
	refuses(func(p *Process) { p.Members = []int{0, 1, 1} }, JAX, "Members 1 at rank 2")
	refuses(func(p *Process) { p.Members = []int{-1, 1} }, JAX, "Members -1 at rank 0")
	refuses(func(p *Process) { p.Rank = 3 }, JAX, "Rank 3", "0 to 2")
	refuses(func(p *Process) { p.Rank = -1 }, JAX, "Rank -1", "outside the generation")
	refuses(func(p *Process) { p.LocalProcesses = 65 }, JAX, "LocalProcesses 65", "1 to 64")
	refuses(func(p *Process) { p.LocalRank = 1 }, JAX, "LocalRank 1", "0 to 0")
	refuses(func(p *Process) { p.FirstPort = 80 }, JAX, "FirstPort 80", "1024 to 65024")
	refuses(func(p *Process) { p.FirstPort = 65025 }, JAX, "FirstPort 65025", "511 ports follow it")
	refuses(func(p *Process) { p.Hosts = []string{"a"} }, JAX, "Hosts has 1 addresses", "want 3")
	refuses(func(p *Process) { p.Hosts = []string{"a", "b:29400", "c"} }, JAX, `Hosts "b:29400" at rank 1`, "without a port")
	refuses(func(p *Process) {}, "mxnet", `framework "mxnet"`, "pytorch")
	if _, err := Write(job(0, 0), JAX, PyTorch, JAX); err == nil || !strings.Contains(err.Error(), `"jax" is named twice`) {
		t.Errorf("a framework twice: %v", err)
	}

	with := func(r ...Role) func(*Process) { return func(p *Process) { p.Roles = r } }
	refuses(func(p *Process) { p.LocalProcesses = 2 }, TensorFlow, "LocalProcesses 2 with TensorFlow", "want 1")
	refuses(func(p *Process) { p.Hosts = []string{"a", "b", "a"} }, TensorFlow, `Hosts "a" at ranks 0 and 2`)
	refuses(with(Role{Type: "master", Ordinals: []int{0, 1, 2}}), TensorFlow, `type "master"`, `"chief"`)
	refuses(with(Role{Type: Worker, Ordinals: []int{0}}, Role{Type: Worker, Ordinals: []int{1, 2}}), TensorFlow, `"worker" twice`)
	refuses(with(Role{Type: Worker, Ordinals: []int{0, 1}}), TensorFlow, "member tw-2 has none", "add it to the workers")
	refuses(with(Role{Type: Worker, Ordinals: []int{0, 1, 2, 3}}), TensorFlow, "worker tw-3 is not among Members")
	refuses(with(Role{Type: Chief, Ordinals: []int{0}}, Role{Type: Worker, Ordinals: []int{0, 1, 2}}), TensorFlow, "tw-0 is chief and worker")
	refuses(with(Role{Type: Chief, Ordinals: []int{0, 1, 2}}), TensorFlow, "3 chiefs", "make the others workers")
	refuses(with(Role{Type: PS, Ordinals: []int{0, 1, 2}}), TensorFlow, "neither a chief nor a worker")
	refuses(with(Role{Type: Worker, Ordinals: []int{0, 2, 1}}), TensorFlow, "worker ordinal 1 at index 2")
	refuses(with(Role{Type: PS, StatefulSet: "ps"}, Role{Type: Worker, Ordinals: []int{0, 1, 2}}), TensorFlow, "ps has 0 ordinals")
	refuses(with(Role{Type: PS, StatefulSet: "p_s", Ordinals: []int{0}}, Role{Type: Worker, Ordinals: []int{0, 1, 2}}), TensorFlow, `StatefulSet "p_s"`)
	refuses(with(Role{Type: Worker, Service: "other", Ordinals: []int{0, 1, 2}}), TensorFlow, `Service "other"`, `"tw"`)
	refuses(with(Role{Type: PS, StatefulSet: strings.Repeat("p", 63), Ordinals: []int{0}}, Role{Type: Worker, Ordinals: []int{0, 1, 2}}), TensorFlow, "name of 65 bytes")
	refuses(func(p *Process) {
		p.Hosts = []string{"a", "b", "c"}
		p.Roles = []Role{{Type: PS, StatefulSet: "ps", Ordinals: []int{0}}, {Type: Worker, Ordinals: []int{0, 1, 2}}}
	}, TensorFlow, "with Hosts", "leave Hosts out")
}

// What the neighbours of a generation left behind is on another port.
func TestPort(t *testing.T) {
	for term := range uint32(16) {
		for count := range uint32(70) {
			port := Port(29500, ring.Generation{Term: term, Count: count})
			if port < 29500 || port >= 29500+Ports {
				t.Fatalf("generation %d.%d has port %d, want 29500 to %d", term, count, port, 29500+Ports-1)
			}
			for later := uint32(1); later < 64; later++ {
				if p := Port(29500, ring.Generation{Term: term, Count: count + later}); p == port {
					t.Fatalf("generations %d.%d and %d.%d have one port, %d", term, count, term, count+later, p)
				}
			}
			for later := uint32(1); later < 8; later++ {
				for next := range uint32(64) {
					if p := Port(29500, ring.Generation{Term: term + later, Count: next}); p == port {
						t.Fatalf("generations %d.%d and %d.%d have one port, %d", term, count, term+later, next, p)
					}
				}
			}
		}
	}
	if p := Port(1024, ring.Generation{Term: 1<<32 - 1, Count: 1<<32 - 1}); p != 1024+Ports-1 {
		t.Errorf("the last generation has port %d, want %d", p, 1024+Ports-1)
	}
}

// value is what a variable is set to.
func (e Environment) value(name string) (string, error) {
	for _, pair := range e.Set {
		if k, v, _ := strings.Cut(pair, "="); k == name {
			return v, nil
		}
	}
	return "", errors.New(name + " is not set")
}

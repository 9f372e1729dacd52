package env

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// chance is a job that can be: any size, with holes, with or without Hosts.
func chance(r *rand.Rand) Process {
	p := Process{StatefulSet: "tw", Namespace: "ml", Service: "ring", FirstPort: 1024 + r.IntN(60000), Step: r.Int64N(1e9), LocalProcesses: 1 + r.IntN(4),
		Generation: ring.Generation{Term: r.Uint32(), Count: 1 + r.Uint32N(1e6)}}
	ordinal := r.IntN(3)
	for range 1 + r.IntN(20) {
		p.Members = append(p.Members, ordinal)
		ordinal += 1 + r.IntN(2)*r.IntN(9)
	}
	switch r.IntN(3) {
	case 0:
		for rank := range p.Members {
			p.Hosts = append(p.Hosts, fmt.Sprintf("10.0.%d.%d", rank, r.IntN(256)))
		}
	case 1:
		p.ClusterDomain = "cluster.local"
	}
	return p
}

// number is a variable's value as a number.
func number(t *testing.T, e Environment, name string) int {
	t.Helper()
	v, err := e.value(name)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

func text(t *testing.T, e Environment, name string) string {
	t.Helper()
	v, err := e.value(name)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// The processes of a generation number themselves without a gap, in the order of ordinals and then within the pod, and meet in one place,
// which is the first one's.
func TestProcessesAgree(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		p := chance(r)
		next := 0
		var first Environment
		for p.Rank = range p.Members {
			for p.LocalRank = range p.LocalProcesses {
				e, err := Write(p, PyTorch, JAX)
				if err != nil {
					t.Fatalf("%+v: %v", p, err)
				}
				if next == 0 {
					first = e
				}
				for _, name := range []string{"RANK", "ROLE_RANK", "JAX_PROCESS_ID", "PROCESS_ID"} {
					if n := number(t, e, name); n != next {
						t.Fatalf("%+v: %s is %d, want %d", p, name, n, next)
					}
				}
				next++
				for _, name := range []string{"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "JAX_COORDINATOR_ADDRESS", "NUM_PROCESSES", "RING_PEERS", "RING_GENERATION"} {
					if got, want := text(t, e, name), text(t, first, name); got != want {
						t.Fatalf("%+v: %s is %s, and %s for the first process", p, name, got, want)
					}
				}
				if n := number(t, e, "GROUP_RANK"); n != p.Rank || number(t, e, "RING_ORDINAL") != p.Members[p.Rank] {
					t.Fatalf("%+v: GROUP_RANK is %d", p, n)
				}
			}
		}
		if n := number(t, first, "WORLD_SIZE"); n != next || number(t, first, "JAX_NUM_PROCESSES") != next {
			t.Fatalf("%+v: WORLD_SIZE is %d, there are %d processes", p, n, next)
		}
		peers := strings.Split(text(t, first, "RING_PEERS"), ",")
		if len(peers) != len(p.Members) || text(t, first, "MASTER_ADDR") != peers[0] {
			t.Fatalf("%+v: peers %q, MASTER_ADDR %s", p, peers, text(t, first, "MASTER_ADDR"))
		}
	}
}

// parsed is a TF_CONFIG as anybody would read it.
type parsed struct {
	Cluster map[string][]string `json:"cluster"`
	Task    struct {
		Type  string `json:"type"`
		Index int    `json:"index"`
	} `json:"task"`
}

// cast deals the members out to roles, by counts from the low ordinals on, as a job with one StatefulSet has to.
func cast(members []int, chief, ps, evaluator int) (roles []Role) {
	for _, c := range []struct {
		t Type
		n int
	}{{Chief, chief}, {PS, ps}, {Evaluator, evaluator}, {Worker, len(members)}} {
		if n := min(c.n, len(members)); n > 0 {
			roles = append(roles, Role{Type: c.t, Ordinals: members[:n]})
			members = members[n:]
		}
	}
	return roles
}

// All tasks see one cluster. Each but an evaluator finds itself in it, under its index; nobody is there twice; the address is the pod's.
func TestTasksAgree(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	distributed := 0
	for range 500 {
		p := chance(r)
		p.LocalProcesses = 1
		p.Roles = cast(p.Members, r.IntN(2), r.IntN(4), r.IntN(2))
		if len(p.Members) == 1 || r.IntN(4) == 0 {
			p.Roles = nil
		}
		trains := p.Roles == nil || slices.ContainsFunc(p.Roles, func(r Role) bool { return r.Type == Chief || r.Type == Worker })
		var cluster map[string][]string
		evaluators := 0
		for p.Rank = range p.Members {
			e, err := Write(p, TensorFlow)
			if !trains {
				if err == nil || !strings.Contains(err.Error(), "nobody would train") {
					t.Fatalf("%+v: %v", p, err)
				}
				continue
			}
			if err != nil {
				t.Fatalf("%+v: %v", p, err)
			}
			if len(p.Members) == 1 {
				if !slices.Equal(e.Unset, []string{"TF_CONFIG"}) {
					t.Fatalf("%+v: unset %q", p, e.Unset)
				}
				continue
			}
			distributed++
			var c parsed
			if err := json.Unmarshal([]byte(text(t, e, "TF_CONFIG")), &c); err != nil {
				t.Fatal(err)
			}
			if cluster == nil {
				cluster = c.Cluster
			}
			if diff := cmp.Diff(cluster, c.Cluster); diff != "" {
				t.Fatalf("%+v: rank %d has another cluster than rank 0:\n%s", p, p.Rank, diff)
			}
			if c.Task.Type == string(Evaluator) {
				evaluators++
				continue
			}
			peer := strings.Split(text(t, e, "RING_PEERS"), ",")[p.Rank]
			if tasks := c.Cluster[c.Task.Type]; c.Task.Index >= len(tasks) || tasks[c.Task.Index] != net.JoinHostPort(peer, fmt.Sprint(Port(p.FirstPort, p.Generation))) {
				t.Fatalf("%+v: %s %d is not %s in %q", p, c.Task.Type, c.Task.Index, peer, tasks)
			}
		}
		seen := map[string]bool{}
		for kind, tasks := range cluster {
			if kind == string(Evaluator) || len(tasks) == 0 {
				t.Fatalf("%+v: the cluster has %s with %d tasks", p, kind, len(tasks))
			}
			for _, address := range tasks {
				if seen[address] {
					t.Fatalf("%+v: %s is there twice", p, address)
				}
				seen[address] = true
			}
		}
		if cluster != nil && len(seen)+evaluators != len(p.Members) {
			t.Fatalf("%+v: %d tasks and %d evaluators of %d members", p, len(seen), evaluators, len(p.Members))
		}
	}
	if distributed < 1000 {
		t.Errorf("only %d TF_CONFIGs were looked at", distributed)
	}
}

// FuzzTensorFlow gives names, ordinals and roles that may be anything. Either it is refused, or TF_CONFIG is one line of JSON that holds
// nothing else than it says, and no variable brings another one along.
func FuzzTensorFlow(f *testing.F) {
	f.Add("tw", "ml", "tw", "cluster.local", "", []byte{0, 1, 2}, byte(1), byte(0), byte(0), byte(1))
	f.Add("ps", "ml", "ps", "", "fd00::1 10.0.0.1", []byte{3, 9}, byte(0), byte(1), byte(1), byte(0))
	f.Add("t\"w", "m\\l", "t\nw", "x\x00", "a", []byte{0, 1}, byte(0), byte(0), byte(0), byte(0))
	f.Fuzz(func(t *testing.T, set, namespace, service, domain, hosts string, members []byte, chief, ps, evaluator, rank byte) {
		p := Process{StatefulSet: set, Namespace: namespace, Service: service, ClusterDomain: domain, Generation: ring.Generation{Term: 1, Count: uint32(rank)}, Rank: int(rank)}
		for _, m := range members {
			p.Members = append(p.Members, int(m))
		}
		if hosts != "" {
			p.Hosts = strings.Split(hosts, " ")
		}
		p.Roles = cast(p.Members, int(chief), int(ps), int(evaluator))
		e, err := Write(p, TensorFlow, PyTorch, JAX)
		if err != nil {
			return
		}
		for _, pair := range slices.Concat(e.Set, e.Defaults, e.Unset) {
			if strings.ContainsAny(pair, "\n\x00") {
				t.Fatalf("%q is more than a line", pair)
			}
		}
		line, err := e.value("TF_CONFIG")
		if err != nil {
			if len(p.Members) != 1 || !slices.Contains(e.Unset, "TF_CONFIG") {
				t.Fatalf("%+v: %v", p, err)
			}
			return
		}
		var c config
		decoder := json.NewDecoder(bytes.NewReader([]byte(line)))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&c); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		again, err := json.Marshal(c)
		if err != nil || string(again) != line {
			t.Fatalf("%s comes back as %s, %v", line, again, err)
		}
		for _, a := range slices.Concat(c.Cluster.Chief, c.Cluster.PS, c.Cluster.Worker) {
			host, port, err := net.SplitHostPort(a)
			if err != nil || host == "" || port != fmt.Sprint(Port(DefaultFirstPort, p.Generation)) {
				t.Fatalf("%s has the address %q: %v", line, a, err)
			}
		}
	})
}

// Package env writes the environment in which a training process finds its generation: who else trains, which of them it is, and where
// they meet, in the variables that PyTorch, TensorFlow and JAX read. All of it is written anew for each generation.
//
// It is a function of its input: it reads no environment, looks nothing up, and starts nothing.
//
// Horovod is left out. With its gloo controller the workers meet in an HTTP key-value store, which horovodrun starts on the host it was
// called on (HOROVOD_GLOO_RENDEZVOUS_ADDR, _PORT); its elastic mode asks a driver there for ranks, in pickled Python objects. Variables
// that name a store which nobody serves would be wrong, whatever else they say.
package env

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// Framework is whose variables are to be written, beside the ring's own.
type Framework string

// The frameworks.
const (
	PyTorch    Framework = "pytorch"
	TensorFlow Framework = "tensorflow"
	JAX        Framework = "jax"
)

// Frameworks are all of them. A process that finds the variables of a framework that it does not use is none the worse for it.
func Frameworks() []Framework { return []Framework{PyTorch, TensorFlow, JAX} }

// Process is one training process's place in a generation. All processes of a generation must be given the same values, but for Rank and
// LocalRank, and, where Roles span several StatefulSets, for StatefulSet, Service and Members.
type Process struct {
	StatefulSet   string // the job's name
	Namespace     string
	Service       string // the headless Service of the StatefulSet
	ClusterDomain string // such as cluster.local; "" = names end in .svc, and the pod's resolver completes them

	Generation ring.Generation
	Step       int64 // steps in the state that the generation begins with

	Members []int    // ordinals, rising: the rank is the index. There may be holes
	Hosts   []string // their addresses by rank, where they are known better than by the Service's names; nil = those
	Rank    int      // of this process's pod

	LocalProcesses int // processes in each pod, one for each of its GPUs; 0 = 1. TensorFlow and JAX usually have one for all
	LocalRank      int // of this one

	FirstPort int    // of the ports that generations use in turn; 0 = DefaultFirstPort
	Roles     []Role // what the members are in TensorFlow's cluster; nil = all are workers
}

// Environment is what is to be changed in the environment that a process inherits. See [Environment.Apply].
type Environment struct {
	Set      []string // K=V, whatever was there. The order is the same for the same input
	Defaults []string // K=V, only where there is no K: what people tune
	Unset    []string // K: a value that is there would be wrong in this generation
}

// Write writes the ring's own variables and those of the frameworks.
func Write(p Process, frameworks ...Framework) (Environment, error) {
	if p.LocalProcesses == 0 {
		p.LocalProcesses = 1
	}
	if p.FirstPort == 0 {
		p.FirstPort = DefaultFirstPort
	}
	if err := p.check(); err != nil {
		return Environment{}, fmt.Errorf("environment: %w", err)
	}
	var e Environment
	p.ring(&e)
	for i, f := range frameworks {
		if slices.Contains(frameworks[:i], f) {
			return Environment{}, fmt.Errorf("environment: framework %q is named twice: leave it out once", f)
		}
		var err error
		switch f {
		case PyTorch:
			p.pyTorch(&e)
		case TensorFlow:
			err = p.tensorFlow(&e)
		case JAX:
			p.jax(&e)
		default:
			err = fmt.Errorf("framework %q: want one of %q", f, Frameworks())
		}
		if err != nil {
			return Environment{}, fmt.Errorf("environment: %w", err)
		}
	}
	return e, nil
}

// Apply returns the environment of a process that would inherit this one. What it was given stays as it is.
func (e Environment) Apply(inherited []string) []string {
	name := func(pair string) string { k, _, _ := strings.Cut(pair, "="); return k }
	ours := map[string]bool{}
	for _, pair := range e.Set {
		ours[name(pair)] = true
	}
	for _, k := range e.Unset {
		ours[k] = true
	}
	kept, there := []string{}, map[string]bool{}
	for _, pair := range inherited {
		if k := name(pair); !ours[k] {
			kept, there[k] = append(kept, pair), true
		}
	}
	for _, pair := range e.Defaults {
		if !there[name(pair)] {
			kept = append(kept, pair)
		}
	}
	return append(kept, e.Set...)
}

func (e *Environment) set(name string, value any) {
	e.Set = append(e.Set, fmt.Sprintf("%s=%v", name, value))
}

// world is how many processes train together, and global which of them this one is: those of one pod are next to each other.
func (p Process) world() int  { return len(p.Members) * p.LocalProcesses }
func (p Process) global() int { return p.Rank*p.LocalProcesses + p.LocalRank }

// ring writes what is the same for all frameworks. It counts workers, which are pods, not processes.
func (p Process) ring(e *Environment) {
	hosts := make([]string, len(p.Members))
	for rank := range p.Members {
		hosts[rank] = p.host(rank)
	}
	e.set("RING_JOB", p.StatefulSet)
	e.set("RING_GENERATION", p.Generation)
	e.set("RING_ORDINAL", p.Members[p.Rank])
	e.set("RING_RANK", p.Rank)
	e.set("RING_WORLD", len(p.Members))
	e.set("RING_PEERS", strings.Join(hosts, ","))
	e.set("RING_RESUME_STEP", p.Step)
}

// maxLocalProcesses is more than any machine has GPUs.
const maxLocalProcesses = 64

// maxOrdinal is the largest number in the fields that ordinals come from.
const maxOrdinal = 1<<31 - 1

// wrong is an error about a field.
func wrong(field, format string, args ...any) error {
	return fmt.Errorf("%s %s", field, fmt.Sprintf(format, args...))
}

// check says which field has which value, what it may be, and what to do.
func (p Process) check() error {
	for _, f := range []struct{ name, value string }{{"StatefulSet", p.StatefulSet}, {"Namespace", p.Namespace}, {"Service", p.Service}} {
		if !isLabel(f.value) {
			return fmt.Errorf("%s %q: want at most 63 of a-z, 0-9 and -, neither first nor last a -; set it to the object's name", f.name, f.value)
		}
	}
	if p.ClusterDomain != "" && !isName(p.ClusterDomain) {
		return wrong("ClusterDomain", "%q: want DNS labels with dots between, at most 200 bytes; leave it out for names that end in .svc", p.ClusterDomain)
	}
	if p.Generation.IsZero() {
		return wrong("Generation", "0.0: want one that a coordinator has proposed; wait for it")
	}
	if p.Step < 0 {
		return wrong("Step", "%d: want 0 or more; a process without a state cannot be in a generation", p.Step)
	}
	if n := len(p.Members); n < 1 || n > ring.MaxMembers {
		return wrong("Members", "has %d ordinals: want 1 to %d; give all of the generation", n, ring.MaxMembers)
	}
	for rank, ordinal := range p.Members {
		if ordinal < 0 || ordinal > maxOrdinal || rank > 0 && ordinal <= p.Members[rank-1] {
			return wrong("Members", "%d at rank %d: want ordinals from 0 to %d, each above the one before; sort them as numbers", ordinal, rank, maxOrdinal)
		}
	}
	if p.Hosts != nil && len(p.Hosts) != len(p.Members) {
		return wrong("Hosts", "has %d addresses: want %d, one for each of Members; leave it out for the Service's names", len(p.Hosts), len(p.Members))
	}
	for rank, host := range p.Hosts {
		if !isName(host) && !isIP(host) {
			return wrong("Hosts", "%q at rank %d: want a DNS name or an IP address, without a port", host, rank)
		}
	}
	if highest := strconv.Itoa(p.Members[len(p.Members)-1]); p.Hosts == nil && len(p.StatefulSet)+1+len(highest) > 63 {
		return wrong("StatefulSet", "%q: pod %s has a name of %d bytes, at most 63 can be looked up; give Hosts or a shorter name", p.StatefulSet, highest, len(p.StatefulSet)+1+len(highest))
	}
	for _, f := range []struct {
		name             string
		value, low, high int
		fix              string
	}{
		{"Rank", p.Rank, 0, len(p.Members) - 1, "a worker outside the generation starts no process for it"},
		{"LocalProcesses", p.LocalProcesses, 1, maxLocalProcesses, "set it to the GPUs of a pod, or leave it out for 1"},
		{"LocalRank", p.LocalRank, 0, p.LocalProcesses - 1, "count from 0 within a pod"},
		{"FirstPort", p.FirstPort, 1024, 65536 - Ports, fmt.Sprintf("%d ports follow it; leave it out for %d", Ports-1, DefaultFirstPort)},
	} {
		if f.value < f.low || f.value > f.high {
			return fmt.Errorf("%s %d: want %d to %d; %s", f.name, f.value, f.low, f.high, f.fix)
		}
	}
	return nil
}

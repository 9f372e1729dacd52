package env

import (
	"encoding/json"
	"fmt"
	"slices"
)

// Type is what a task is in TensorFlow's cluster.
type Type string

// The types.
const (
	Chief     Type = "chief"     // MultiWorkerMirroredStrategy: the worker that also writes checkpoints; parameter servers: the coordinator
	Worker    Type = "worker"    // without a chief the first worker is it
	PS        Type = "ps"        // parameter server
	Evaluator Type = "evaluator" // knows the cluster and is not part of it
)

// Role is the tasks of one type: the pods of a StatefulSet, or some of them. The task's index is the ordinal's index, so it is dense.
type Role struct {
	Type        Type
	StatefulSet string // "" = the process's own
	Service     string // its headless Service; "" = the process's own if StatefulSet is, else the StatefulSet's name
	Ordinals    []int  // rising; those of the process's own StatefulSet must all be members of the generation
}

// config is TF_CONFIG. The cluster has no evaluator, or the strategies would wait for it.
type config struct {
	Cluster cluster `json:"cluster"`
	Task    task    `json:"task"`
}

type cluster struct {
	Chief  []string `json:"chief,omitempty"`
	PS     []string `json:"ps,omitempty"`
	Worker []string `json:"worker,omitempty"`
}

type task struct {
	Type  Type `json:"type"`
	Index int  `json:"index"`
}

// tensorFlow writes TF_CONFIG: the same cluster for every task of a generation. A job of one task is not distributed, and must have none.
func (p Process) tensorFlow(e *Environment) error {
	if p.LocalProcesses != 1 {
		return wrong("LocalProcesses", "%d with TensorFlow: want 1; one process uses all GPUs of its pod", p.LocalProcesses)
	}
	roles := []Role{{Type: Worker, Ordinals: p.Members}}
	if len(p.Roles) > 0 {
		roles = slices.Clone(p.Roles)
	}
	for i, r := range roles {
		switch {
		case r.StatefulSet == "" || r.StatefulSet == p.StatefulSet:
			roles[i].StatefulSet = p.StatefulSet
			if r.Service == "" {
				roles[i].Service = p.Service
			}
		case r.Service == "":
			roles[i].Service = r.StatefulSet
		}
	}
	if err := p.checkRoles(roles); err != nil {
		return err
	}
	var c config
	tasks := 0
	for _, r := range roles {
		var addresses []string
		for index, ordinal := range r.Ordinals {
			host := p.name(r.StatefulSet, r.Service, ordinal)
			if r.StatefulSet == p.StatefulSet {
				rank, _ := slices.BinarySearch(p.Members, ordinal)
				host = p.host(rank)
				if rank == p.Rank {
					c.Task = task{r.Type, index}
				}
			}
			addresses = append(addresses, address(host, p.port()))
		}
		tasks += len(addresses)
		switch r.Type {
		case Chief:
			c.Cluster.Chief = addresses
		case PS:
			c.Cluster.PS = addresses
		case Worker:
			c.Cluster.Worker = addresses
		}
	}
	if tasks == 1 {
		e.Unset = append(e.Unset, "TF_CONFIG")
		return nil
	}
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	e.set("TF_CONFIG", string(text))
	return nil
}

// checkRoles wants each member to be one task, and the tasks to make a cluster.
func (p Process) checkRoles(roles []Role) error {
	count := map[Type]int{}
	taken := map[string]Type{} // by pod
	hosts := map[string]int{}
	for rank, host := range p.Hosts {
		if other, ok := hosts[host]; ok {
			return wrong("Hosts", "%q at ranks %d and %d: want one for each pod, for all tasks listen on one port; leave Hosts out for the Service's names", host, other, rank)
		}
		hosts[host] = rank
	}
	for _, r := range roles {
		own := r.StatefulSet == p.StatefulSet
		switch {
		case r.Type != Chief && r.Type != Worker && r.Type != PS && r.Type != Evaluator:
			return wrong("Roles:", "type %q: want one of %q", r.Type, []Type{Chief, Worker, PS, Evaluator})
		case count[r.Type] > 0:
			return wrong("Roles:", "type %q twice: give all its pods in one", r.Type)
		case !isLabel(r.StatefulSet) || !isLabel(r.Service):
			return wrong("Roles:", "%s of StatefulSet %q, Service %q: want at most 63 of a-z, 0-9 and -; set them to the objects' names", r.Type, r.StatefulSet, r.Service)
		case own && r.Service != p.Service:
			return wrong("Roles:", "%s has Service %q: want the StatefulSet's, %q; leave it out", r.Type, r.Service, p.Service)
		case !own && p.Hosts != nil:
			return wrong("Roles:", "%s of StatefulSet %q with Hosts: want names for all, else the tasks would not see the same cluster; leave Hosts out", r.Type, r.StatefulSet)
		case len(r.Ordinals) == 0 || len(r.Ordinals) > maxTasks:
			return wrong("Roles:", "%s has %d ordinals: want 1 to %d; leave a role out that has none", r.Type, len(r.Ordinals), maxTasks)
		}
		for i, ordinal := range r.Ordinals {
			if ordinal < 0 || ordinal > maxOrdinal || i > 0 && ordinal <= r.Ordinals[i-1] {
				return wrong("Roles:", "%s ordinal %d at index %d: want ordinals from 0 to %d, each above the one before; sort them as numbers", r.Type, ordinal, i, maxOrdinal)
			}
			pod := fmt.Sprintf("%s-%d", r.StatefulSet, ordinal)
			if other, ok := taken[pod]; ok {
				return wrong("Roles:", "pod %s is %s and %s: want one; take it out of the other", pod, other, r.Type)
			}
			if _, member := slices.BinarySearch(p.Members, ordinal); own && !member {
				return wrong("Roles:", "%s %s is not among Members: want members of the generation; take it out", r.Type, pod)
			}
			if len(pod) > 63 && p.Hosts == nil {
				return wrong("Roles:", "pod %s has a name of %d bytes, at most 63 can be looked up; shorten the StatefulSet's", pod, len(pod))
			}
			taken[pod] = r.Type
		}
		count[r.Type] = len(r.Ordinals)
	}
	for _, ordinal := range p.Members {
		if pod := fmt.Sprintf("%s-%d", p.StatefulSet, ordinal); taken[pod] == "" {
			return wrong("Roles:", "member %s has none: want one for each; add it to the workers", pod)
		}
	}
	if count[Chief] > 1 {
		return wrong("Roles:", "%d chiefs: want one; make the others workers", count[Chief])
	}
	if count[Chief]+count[Worker] == 0 {
		return wrong("Roles:", "neither a chief nor a worker: want one at least, for nobody would train; add it")
	}
	return nil
}

// maxTasks bounds a role as the ring bounds its members.
const maxTasks = 4096

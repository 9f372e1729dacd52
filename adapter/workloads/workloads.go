// Package workloads knows who should report: the StatefulSets that hold GPUs or that a HorizontalPodAutoscaler scales by
// one of our metrics, and their pods; and which of them a request means.
//
// A pod that no StatefulSet owns is no workload, whatever GPUs it holds. Ownership is by UID, never by name. The package
// decides nothing about values: that is for rules.Decide.
//
// [Build] and [Table] are pure; [Watcher] keeps their input by informers that store only what is asked of an object.
package workloads

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/capstan-gpu/capstan/rules"
)

// HPA is what matters of a HorizontalPodAutoscaler.
type HPA struct {
	Namespace, Name        string
	TargetKind, TargetName string // its scaleTargetRef
	Asks                   []Ask  // its External metrics
}

// Ask is one External metric of an HPA.
type Ask struct {
	Metric   string          // lower case
	Selector labels.Selector // nil = none, or one that selects everything
}

// StatefulSet is what matters of a StatefulSet.
type StatefulSet struct {
	Namespace, Name, UID string
	GPUs                 int    // that a pod of its template requests
	Ended                string // how its job ended, as is written on it for its UID; "" = it has not
}

// Pod is what matters of a pod that a StatefulSet owns.
type Pod struct {
	Namespace string
	Owner     string // UID of the StatefulSet
	rules.Pod
}

// View is who should report and who asks, at one moment. Immutable.
type View struct {
	Workloads []rules.Workload // sorted by namespace and name
	hpas      map[string][]HPA // by namespace, sorted by name; only those that ask for an External metric
}

// Build makes a View. A StatefulSet is a workload when its pods hold GPUs, or its template asks for some, or an HPA that
// asks for one of the metrics (lower case) scales it.
func Build(hpas []HPA, sets []StatefulSet, pods []Pod, metrics []string) *View {
	v := &View{hpas: map[string][]HPA{}}
	type key struct{ namespace, name string }
	asked := map[key]bool{}
	for _, h := range hpas {
		if !slices.ContainsFunc(h.Asks, func(a Ask) bool { return slices.Contains(metrics, a.Metric) }) {
			continue
		}
		v.hpas[h.Namespace] = append(v.hpas[h.Namespace], h)
		if h.TargetKind == kindStatefulSet {
			asked[key{h.Namespace, h.TargetName}] = true
		}
	}
	for _, list := range v.hpas {
		slices.SortFunc(list, func(a, b HPA) int { return cmp.Compare(a.Name, b.Name) })
	}

	owned := map[string][]rules.Pod{}
	withGPU := map[string]bool{}
	for _, p := range pods {
		owned[p.Owner] = append(owned[p.Owner], p.Pod)
		if p.GPUs > 0 {
			withGPU[p.Owner] = true
		}
	}
	for _, s := range sets {
		if s.GPUs == 0 && !withGPU[s.UID] && !asked[key{s.Namespace, s.Name}] {
			continue
		}
		list := owned[s.UID]
		slices.SortFunc(list, func(a, b rules.Pod) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID)) })
		v.Workloads = append(v.Workloads, rules.Workload{Namespace: s.Namespace, Name: s.Name, UID: s.UID, Pods: list, Ended: s.Ended})
	}
	slices.SortFunc(v.Workloads, func(a, b rules.Workload) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return v
}

// Asks says whether any HPA asks for the metric (lower case).
func (v *View) Asks(metric string) bool {
	for _, list := range v.hpas {
		if slices.ContainsFunc(list, func(h HPA) bool { return slices.ContainsFunc(h.Asks, func(a Ask) bool { return a.Metric == metric }) }) {
			return true
		}
	}
	return false
}

// Asked says whether an HPA that scales the StatefulSet asks for the metric (lower case).
func (v *View) Asked(namespace, workload, metric string) bool {
	return slices.ContainsFunc(v.hpas[namespace], func(h HPA) bool {
		return h.TargetKind == kindStatefulSet && h.TargetName == workload &&
			slices.ContainsFunc(h.Asks, func(a Ask) bool { return a.Metric == metric })
	})
}

const kindStatefulSet = "StatefulSet"

// SelectorSafe turns a value into one that a label selector can name: at most 63 of letters, digits, '-', '_' and '.',
// with a letter or digit at both ends. A value that is so already stays as it is.
func SelectorSafe(value string) string {
	if len(value) <= 63 && safe(value) {
		return value
	}
	var b strings.Builder
	for _, c := range value {
		if c < 128 && inside(byte(c)) {
			b.WriteByte(byte(c))
		} else {
			b.WriteByte('-')
		}
	}
	out := strings.Trim(b.String(), "-_.")
	if len(out) > 63 {
		out = strings.TrimRight(out[:63], "-_.")
	}
	return out
}

func safe(value string) bool {
	for i := range len(value) {
		if !inside(value[i]) {
			return false
		}
	}
	return value == "" || end(value[0]) && end(value[len(value)-1])
}

func end(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

func inside(c byte) bool { return end(c) || c == '-' || c == '_' || c == '.' }

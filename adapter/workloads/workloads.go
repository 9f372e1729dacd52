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
	"maps"
	"slices"
	"strings"
	"unique"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/capstan-gpu/capstan/rules"
)

// HPA is what matters of a HorizontalPodAutoscaler.
type HPA struct {
	Namespace, Name        string
	TargetKind, TargetName string   // its scaleTargetRef
	Asks                   []Ask    // its External metrics
	Pods                   []string // its metrics of type Pods, lower case
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
	Labels    Labels
	rules.Pod
}

// Labels are a pod's labels. Pods that have the same share them in memory, but for those of the StatefulSet controller that are each
// pod's own, which are not kept. The zero value has none.
type Labels struct {
	text unique.Handle[string] // key, 0, value, 0, …
	set  bool
}

// LabelsOf takes up a pod's labels.
func LabelsOf(all map[string]string) Labels {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if key == appsv1.StatefulSetPodNameLabel || key == appsv1.PodIndexLabel {
			continue
		}
		b.WriteString(key + "\x00" + all[key] + "\x00")
	}
	return Labels{unique.Make(b.String()), true}
}

// lookup finds a label of the pod with this name.
func (l Labels) lookup(pod, key string) (value string, ok bool) {
	switch key {
	case appsv1.StatefulSetPodNameLabel:
		return pod, true
	case appsv1.PodIndexLabel:
		return pod[strings.LastIndexByte(pod, '-')+1:], true
	}
	if !l.set {
		return "", false
	}
	for rest := l.text.Value(); rest != ""; {
		var k string
		k, rest, _ = strings.Cut(rest, "\x00")
		value, rest, _ = strings.Cut(rest, "\x00")
		if k == key {
			return value, true
		}
	}
	return "", false
}

// podLabels are the labels of one pod, for a selector.
type podLabels struct {
	pod string
	all Labels
}

var _ labels.Labels = podLabels{}

// Lookup implements [labels.Labels].
func (l podLabels) Lookup(key string) (string, bool) { return l.all.lookup(l.pod, key) }

// Has implements [labels.Labels].
func (l podLabels) Has(key string) bool { _, ok := l.Lookup(key); return ok }

// Get implements [labels.Labels].
func (l podLabels) Get(key string) string { v, _ := l.Lookup(key); return v }

// View is who should report and who asks, at one moment. Immutable.
type View struct {
	Workloads []rules.Workload // sorted by namespace and name
	labels    [][]Labels       // of each workload's pods
	hpas      map[string][]HPA // by namespace, sorted by name; only those that ask for one of the metrics
}

// Build makes a View. A StatefulSet is a workload when its pods hold GPUs, or its template asks for some, or an HPA that
// asks for one of the metrics (lower case) scales it.
func Build(hpas []HPA, sets []StatefulSet, pods []Pod, metrics []string) *View {
	v := &View{hpas: map[string][]HPA{}}
	type key struct{ namespace, name string }
	asked := map[key]bool{}
	for _, h := range hpas {
		if !slices.ContainsFunc(h.Asks, func(a Ask) bool { return slices.Contains(metrics, a.Metric) }) &&
			!slices.ContainsFunc(h.Pods, func(m string) bool { return slices.Contains(metrics, m) }) {
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

	owned := map[string][]Pod{}
	withGPU := map[string]bool{}
	for _, p := range pods {
		owned[p.Owner] = append(owned[p.Owner], p)
		if p.GPUs > 0 {
			withGPU[p.Owner] = true
		}
	}
	sets = slices.SortedFunc(slices.Values(sets), func(a, b StatefulSet) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	for _, s := range sets {
		if s.GPUs == 0 && !withGPU[s.UID] && !asked[key{s.Namespace, s.Name}] {
			continue
		}
		own := owned[s.UID]
		slices.SortFunc(own, func(a, b Pod) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID)) })
		w := rules.Workload{Namespace: s.Namespace, Name: s.Name, UID: s.UID, Ended: s.Ended}
		ownLabels := make([]Labels, len(own))
		for i, p := range own {
			w.Pods = append(w.Pods, p.Pod)
			ownLabels[i] = p.Labels
		}
		v.Workloads, v.labels = append(v.Workloads, w), append(v.labels, ownLabels)
	}
	return v
}

// Asks says whether any HPA asks for the metric (lower case).
func (v *View) Asks(metric string) bool {
	for _, list := range v.hpas {
		if slices.ContainsFunc(list, func(h HPA) bool {
			return slices.Contains(h.Pods, metric) || slices.ContainsFunc(h.Asks, func(a Ask) bool { return a.Metric == metric })
		}) {
			return true
		}
	}
	return false
}

// Asked says whether an HPA that scales the StatefulSet asks for the metric (lower case).
func (v *View) Asked(namespace, workload, metric string) bool {
	return slices.ContainsFunc(v.hpas[namespace], func(h HPA) bool {
		return h.TargetKind == kindStatefulSet && h.TargetName == workload &&
			(slices.Contains(h.Pods, metric) || slices.ContainsFunc(h.Asks, func(a Ask) bool { return a.Metric == metric }))
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

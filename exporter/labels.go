package exporter

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/capstan-gpu/capstan/metricname"
)

// maxPodLabels bounds what pods can add to the page: one series a pod, and this many labels on it.
const maxPodLabels = 16

var notInLabel = regexp.MustCompile(`[^a-zA-Z0-9_]`)

// labelNames are the labels of the page for keys of pod labels: app.kubernetes.io/name is label_app_kubernetes_io_name. The prefix keeps
// a pod's label from being taken for one of ours, and two keys that would be one name are refused: Prometheus would drop the whole page.
func labelNames(keys []string) ([]string, error) {
	if len(keys) > maxPodLabels {
		return nil, fmt.Errorf("%d labels: want at most %d", len(keys), maxPodLabels)
	}
	var names []string
	for i, key := range keys {
		if key == "" {
			return nil, fmt.Errorf("label %d has no name", i+1)
		}
		name := "label_" + notInLabel.ReplaceAllString(key, "_")
		if at := slices.Index(names, name); at >= 0 {
			return nil, fmt.Errorf("%q and %q would both be %s: leave one out", keys[at], key, name)
		}
		names = append(names, name)
	}
	return names, nil
}

// podLabels renders the labels of pods that hold a GPU, one series each.
type podLabels struct {
	snapshot func() *Snapshot
	family   *family
}

// newPodLabels makes the renderer for keys that are valid.
func newPodLabels(snapshot func() *Snapshot, names []string) *podLabels {
	return &podLabels{snapshot, gauge(metricname.PodLabels, "Labels of a pod that holds a GPU, as they were asked for.", ofPod(names...)...)}
}

func (c *podLabels) render(p page) {
	s := c.snapshot()
	holding := map[string]bool{}
	for _, a := range s.Held {
		holding[a.PodUID] = true
	}
	for _, pod := range s.Mapping.Pods {
		if holding[pod.UID] && strings.Join(pod.Labels, "") != "" {
			p.add(c.family, 1, append([]string{pod.Namespace, pod.Name, pod.UID}, pod.Labels...)...)
		}
	}
}

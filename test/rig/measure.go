package rig

import (
	"context"
	"encoding/json"
	"fmt"
	"sort"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/metrics/pkg/apis/external_metrics/v1beta1"
)

// Use is what one container of Capstan holds.
type Use struct {
	Pod, Node string
	RSS       float64 // bytes
}

// Memory reads the resident memory of Capstan's own pods from the kubelets' summary API.
func (c *Cluster) Memory(ctx context.Context) ([]Use, error) {
	nodes, err := c.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	var all []Use
	for _, node := range nodes {
		raw, err := c.Clients.CoreV1().RESTClient().Get().Resource("nodes").Name(node).SubResource("proxy").Suffix("stats/summary").Do(ctx).Raw()
		if err != nil {
			return nil, fmt.Errorf("read the memory of pods on %s: %w", node, err)
		}
		var summary struct {
			Pods []struct {
				PodRef     struct{ Name, Namespace string }
				Containers []struct {
					Memory struct{ RSSBytes float64 }
				}
			}
		}
		if err := json.Unmarshal(raw, &summary); err != nil {
			return nil, fmt.Errorf("decode the summary of %s: %w", node, err)
		}
		for _, p := range summary.Pods {
			if p.PodRef.Namespace != SystemNamespace && !strings.HasPrefix(p.PodRef.Name, "capstan-exporter") {
				continue
			}
			for _, k := range p.Containers {
				all = append(all, Use{Pod: p.PodRef.Name, Node: node, RSS: k.Memory.RSSBytes})
			}
		}
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Pod < all[j].Pod })
	return all, nil
}

// Windows says with which windows the adapter serves utilization: the lines of its rule file that name them.
func (c *Cluster) Windows(ctx context.Context) (string, error) {
	maps, err := c.Clients.CoreV1().ConfigMaps(SystemNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	for _, m := range maps.Items {
		for _, text := range m.Data {
			if !strings.Contains(text, Metric) {
				continue
			}
			var words []string
			for line := range strings.Lines(text) {
				key, value, ok := strings.Cut(strings.TrimSpace(strings.TrimLeft(line, " -")), ":")
				switch key {
				case "metric":
					if len(words) > 0 {
						return strings.Join(words, ", "), nil
					}
				case "window", "maxAge", "joinFor", "holdFor":
					if ok {
						words = append(words, key+" "+strings.TrimSpace(value))
					}
				}
			}
			return strings.Join(words, ", "), nil
		}
	}
	return "the adapter's defaults", nil
}

// SortByOrdinal orders items by the ordinal at the end of their worker's name, as numbers: web-10 after web-9.
func SortByOrdinal(items []v1beta1.ExternalMetricValue) {
	ordinal := func(i int) int {
		name := items[i].MetricLabels["pod"]
		n, err := strconv.Atoi(name[strings.LastIndex(name, "-")+1:])
		if err != nil {
			return -1
		}
		return n
	}
	sort.SliceStable(items, func(i, j int) bool { return ordinal(i) < ordinal(j) })
}

package exporter

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// family is a name on the page, with what it means and the names of its labels.
type family struct {
	name, help string
	kind       dto.MetricType // gauge or counter
	labels     []string       // in the order of add's arguments
	sorted     []int          // indexes of labels, by name: the page has them so
}

func newFamily(kind dto.MetricType, name, help string, labels []string) *family {
	f := &family{name: name, help: help, kind: kind, labels: labels, sorted: make([]int, len(labels))}
	for i := range labels {
		f.sorted[i] = i
	}
	slices.SortFunc(f.sorted, func(a, b int) int { return cmp.Compare(labels[a], labels[b]) })
	return f
}

func gauge(name, help string, labels ...string) *family {
	return newFamily(dto.MetricType_GAUGE, name, help, labels)
}

func counter(name, help string, labels ...string) *family {
	return newFamily(dto.MetricType_COUNTER, name, help, labels)
}

// renderer writes what it knows on a page.
type renderer interface{ render(page) }

// gatherer is a prometheus.Gatherer of renderers. It is no prometheus.Collector in a Registry, which checks each series of each
// scrape anew, on two cores, for five times the price of making them: fifty scrapers at once waited for that. What the Registry would
// find is found by the tests, with its own checks. Safe for concurrent use.
type gatherer []renderer

// Gather renders anew. It never fails.
func (g gatherer) Gather() ([]*dto.MetricFamily, error) {
	p := page{}
	for _, r := range g {
		r.render(p)
	}
	return slices.SortedFunc(maps.Values(p), func(a, b *dto.MetricFamily) int { return cmp.Compare(*a.Name, *b.Name) }), nil
}

// page is one rendering.
type page map[*family]*dto.MetricFamily

// add writes a series. It keeps labels, one value for each of the family's.
func (p page) add(f *family, v float64, labels ...string) {
	out := p[f]
	if out == nil {
		out = &dto.MetricFamily{Name: &f.name, Help: &f.help, Type: &f.kind}
		p[f] = out
	}
	metric := &dto.Metric{}
	if f.kind == dto.MetricType_COUNTER {
		metric.Counter = &dto.Counter{Value: &v}
	} else {
		metric.Gauge = &dto.Gauge{Value: &v}
	}
	pairs := make([]dto.LabelPair, len(labels))
	metric.Label = make([]*dto.LabelPair, len(labels))
	for i, of := range f.sorted {
		labels[of] = strings.ToValidUTF8(labels[of], "�") // a driver's string is bytes
		pairs[i].Name, pairs[i].Value = &f.labels[of], &labels[of]
		metric.Label[i] = &pairs[i]
	}
	out.Metric = append(out.Metric, metric)
}

// maybe writes nothing if v is not known.
func (p page) maybe(f *family, v *float64, labels ...string) {
	if v != nil {
		p.add(f, *v, labels...)
	}
}

func (p page) bytes(f *family, v *uint64, labels ...string) {
	if v != nil {
		p.add(f, float64(*v), labels...)
	}
}

func (p page) flag(f *family, set *bool, labels ...string) {
	if set != nil {
		p.add(f, number(*set), labels...)
	}
}

// each writes one series for each key, which is the last label.
func (p page) each(f *family, values map[string]float64, labels ...string) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		p.add(f, values[key], append(slices.Clone(labels), key)...)
	}
}

// counts writes one series for each key, which is the only label.
func (p page) counts(f *family, counts map[string]uint64) {
	for _, key := range slices.Sorted(maps.Keys(counts)) {
		p.add(f, float64(counts[key]), key)
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// beside joins what the process says of itself with what it has measured. They have no name in common.
func beside(process *prometheus.Registry, measured gatherer) prometheus.TransactionalGatherer {
	return prometheus.NewMultiTRegistry(prometheus.ToTransactionalGatherer(process), prometheus.ToTransactionalGatherer(measured))
}

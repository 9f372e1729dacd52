package trainer

import (
	"bytes"
	"maps"
	"math"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/capstan-gpu/capstan/trainer/stats"
)

// parse takes the known families out of a page. It refuses the whole page when a bound is broken or a line cannot be read, and
// single samples, counted by reason, when only they are wrong. Names that are not known are nobody's business, but count.
// Pure; keeps nothing of body.
func parse(body []byte, known map[string]*stats.Family) (samples []Sample, refused map[string]uint64, err error) {
	if err := bounded(body); err != nil {
		return nil, nil, err
	}
	if n := len(body); n > 0 && body[n-1] != '\n' {
		body = append(slices.Clip(body), '\n')
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	if err != nil {
		return nil, nil, refusal{ReasonParse, err}
	}
	for name, family := range families {
		if len(name) > stats.MaxNameBytes {
			return nil, nil, refuse(ReasonLimits, "a name of %d bytes, at most %d", len(name), stats.MaxNameBytes)
		}
		for _, m := range family.Metric {
			if err := boundedLabels(m.Label); err != nil {
				return nil, nil, err
			}
		}
	}
	refused = map[string]uint64{}
	for _, name := range slices.Sorted(maps.Keys(families)) {
		family, ok := known[name]
		if !ok {
			continue
		}
		seen := map[string]bool{}
		for _, m := range families[name].Metric {
			s, reason := sampleOf(family, m)
			if reason == "" && seen[key(s)] {
				reason = ReasonDuplicate
			}
			if reason != "" {
				refused[reason]++
				continue
			}
			seen[key(s)] = true
			samples = append(samples, s)
		}
	}
	return samples, refused, nil
}

// bounded looks at the lines before anybody builds something of them: a 256 KiB page may hold 60,000 series.
func bounded(body []byte) error {
	lines, samples := 0, 0
	for line := range bytes.Lines(body) {
		lines++
		if len(line) > MaxLine {
			return refuse(ReasonLimits, "a line of %d bytes, at most %d", len(line), MaxLine)
		}
		if line = bytes.TrimSpace(line); len(line) > 0 && line[0] != '#' {
			samples++
		}
		if lines > MaxLines || samples > stats.MaxSamples {
			return refuse(ReasonLimits, "more than %d samples or %d lines", stats.MaxSamples, MaxLines)
		}
	}
	return nil
}

func boundedLabels(labels []*dto.LabelPair) error {
	if len(labels) > stats.MaxLabels {
		return refuse(ReasonLimits, "%d labels, at most %d", len(labels), stats.MaxLabels)
	}
	for _, l := range labels {
		if len(l.GetName()) > stats.MaxNameBytes || len(l.GetValue()) > stats.MaxValueBytes {
			return refuse(ReasonLimits, "a label of %d and %d bytes, at most %d and %d", len(l.GetName()), len(l.GetValue()), stats.MaxNameBytes, stats.MaxValueBytes)
		}
	}
	return nil
}

// sampleOf checks one sample of a known family. The kind is the family's, whatever the page calls it.
func sampleOf(family *stats.Family, m *dto.Metric) (Sample, string) {
	s := Sample{Family: family, Labels: make([]string, len(family.Labels))}
	for _, l := range m.Label {
		i := slices.Index(family.Labels, l.GetName())
		if i < 0 {
			return Sample{}, ReasonLabels
		}
		s.Labels[i] = strings.Clone(l.GetValue())
	}
	switch {
	case m.Counter != nil:
		s.Value = m.Counter.GetValue()
	case m.Gauge != nil:
		s.Value = m.Gauge.GetValue()
	case m.Untyped != nil:
		s.Value = m.Untyped.GetValue()
	default:
		return Sample{}, ReasonType
	}
	if math.IsNaN(s.Value) || s.Value < 0 || s.Value > stats.MaxNumber {
		return Sample{}, ReasonValue
	}
	return s, ""
}

func key(s Sample) string { return strings.Join(s.Labels, "\x00") }

package collect

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"

	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
)

const (
	nodeLabel    = "node"
	processStart = "process_start_time_seconds"
)

var errTooMany = errors.New("decode: more series")

// Page is what one exporter's page says, decoded.
type Page struct {
	Samples  []store.Sample         // of the families kept, all with the same At and with the label node; only finite values
	Start    time.Time              // when the exporter's process started; zero = the page does not say
	Snapshot time.Time              // when the exporter took what it shows, by its own clock; zero = the page does not say
	Models   map[string]string      // pod UID ─► GPU model, several of them joined by "_"; nil = none known
	Rings    map[string]*rules.Ring // pod UID ─► what its trainer says of the ring; nil = no trainer says anything
	Dropped  int                    // samples of kept families whose value is NaN or infinite
}

// Families is the set of family names whose samples are kept. A nil set keeps every family that Capstan exports.
type Families map[string]bool

func (f Families) keeps(name []byte) bool {
	if f == nil {
		return strings.HasPrefix(string(name), metricname.Prefix)
	}
	return f[string(name)]
}

// query asks an exporter for what is kept and what is read besides, and nothing more; "" asks for everything.
func (f Families) query() string {
	if f == nil {
		return ""
	}
	names := map[string]bool{processStart: true, metricname.SnapshotTimestamp: true, metricname.GPUInfo: true, metricname.InstanceInfo: true, metricname.GPUAllocationInfo: true,
		metricname.TrainingSteps: true, metricname.TrainingStepDuration: true, metricname.TrainingGeneration: true, metricname.TrainingGenerationAge: true}
	maps.Copy(names, f)
	return "?" + url.Values{"name[]": slices.Sorted(maps.Keys(names))}.Encode()
}

// Decode reads a page in the Prometheus text format. node becomes the label of that name on every sample, whatever the
// page says, and at their time: an exporter has no say in either. More than maxSeries kept samples are an error, and so
// is any line that is not well-formed: half a page would look like workers that left.
func Decode(page []byte, node string, at time.Time, keep Families, maxSeries int) (Page, error) {
	var out Page
	var lset labels.Labels
	builder := labels.NewBuilder(labels.EmptyLabels())
	models := map[string]string{}  // GPU UUID ─► model
	parents := map[string]string{} // MIG instance's UUID ─► that of its GPU
	type holding struct{ uuid, pod string }
	var holdings []holding

	p := textparse.NewPromParser(page, labels.NewSymbolTable(), false)
	for {
		entry, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return Page{}, fmt.Errorf("decode: %w", err)
		}
		if entry != textparse.EntrySeries {
			continue
		}
		series, _, value := p.Series()
		switch name := familyOf(series); string(name) {
		case processStart:
			out.Start = seconds(value)
			continue
		case metricname.SnapshotTimestamp:
			out.Snapshot = seconds(value)
			continue
		case metricname.GPUInfo:
			p.Labels(&lset)
			if model := lset.Get(metricname.Model); model != "" {
				models[strings.Clone(lset.Get(metricname.UUID))] = strings.Clone(model)
			}
			if !keep.keeps(name) {
				continue
			}
		case metricname.InstanceInfo:
			p.Labels(&lset)
			parents[strings.Clone(lset.Get(metricname.UUID))] = strings.Clone(lset.Get(metricname.ParentUUID))
			if !keep.keeps(name) {
				continue
			}
		case metricname.GPUAllocationInfo:
			p.Labels(&lset)
			holdings = append(holdings, holding{lset.Get(metricname.UUID), lset.Get(metricname.PodUID)})
			if !keep.keeps(name) {
				continue
			}
		case metricname.TrainingSteps, metricname.TrainingStepDuration, metricname.TrainingGeneration, metricname.TrainingGenerationAge:
			p.Labels(&lset)
			out.ring(lset.Get(metricname.PodUID), string(name), value, at)
			if !keep.keeps(name) {
				continue
			}
		default:
			if !keep.keeps(name) {
				continue
			}
		}
		if math.IsNaN(value) || math.IsInf(value, 0) {
			out.Dropped++
			continue
		}
		if len(out.Samples) == maxSeries {
			return Page{}, fmt.Errorf("%w than %d", errTooMany, maxSeries)
		}
		p.Labels(&lset)
		if label, twice := lset.HasDuplicateLabelNames(); twice {
			return Page{}, fmt.Errorf("decode: %s has the label %s twice", series, label)
		}
		builder.Reset(lset)
		builder.Set(nodeLabel, node)
		out.Samples = append(out.Samples, store.Sample{Labels: builder.Labels(), Value: value, At: at})
	}

	for _, h := range holdings {
		if parent := parents[h.uuid]; parent != "" {
			h.uuid = parent
		}
		model, known := models[h.uuid]
		if !known || h.pod == "" {
			continue
		}
		if out.Models == nil {
			out.Models = map[string]string{}
		}
		if had := out.Models[h.pod]; had == "" {
			out.Models[strings.Clone(h.pod)] = model
		} else if parts := strings.Split(had, "_"); !slices.Contains(parts, model) {
			parts = append(parts, model)
			slices.Sort(parts)
			out.Models[h.pod] = strings.Join(parts, "_")
		}
	}
	return out, nil
}

// ring takes in one number that a trainer says of its ring. What is no number that it can be is left out, which is: not said.
func (p *Page) ring(uid, family string, v float64, at time.Time) {
	if uid == "" || !(v >= 0) || v > 1e15 {
		return
	}
	r := p.Rings[uid]
	if r == nil {
		if p.Rings == nil {
			p.Rings = map[string]*rules.Ring{}
		}
		r = &rules.Ring{Steps: -1, SampleTaken: at}
		p.Rings[strings.Clone(uid)] = r
	}
	switch family {
	case metricname.TrainingSteps:
		r.Steps = v
	case metricname.TrainingStepDuration:
		r.StepTakes = time.Duration(min(v, 1e6) * float64(time.Second))
	case metricname.TrainingGeneration:
		r.Generation = v
	case metricname.TrainingGenerationAge:
		r.Began = at.Add(-time.Duration(min(v, 1e9) * float64(time.Second)))
	}
}

// familyOf cuts the name off a series as it stands on the page. A quoted name, which stands inside the braces, gives "".
func familyOf(series []byte) []byte {
	for i, c := range series {
		if c == '{' || c == ' ' || c == '\t' {
			return series[:i]
		}
	}
	return series
}

// seconds is the time of a Unix time in seconds; what is no such time is the zero time.
func seconds(v float64) time.Time {
	if !(v > 0) || v > 1e11 {
		return time.Time{}
	}
	whole, fraction := math.Modf(v)
	return time.Unix(int64(whole), int64(fraction*1e9))
}

// Package stats is a trainer's stats page: the names on it, a writer, and the bounds within which a page is read.
// It is a leaf that the trainer's side and the exporter both import, and needs the standard library only.
//
// A page holds numbers about one process: it never says whose they are. Namespace, pod and UID come from the kubelet, so a page that
// names them is refused. A value that is not known is left out; it is never 0 for that reason. Counters are monotone per process.
package stats

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// Names of families, as on the page. The exporter puts capstan_ in front.
const (
	Steps                = "training_steps_total"
	Samples              = "training_samples_total"
	StepDuration         = "training_step_duration_seconds"
	WorldSize            = "training_world_size"
	Rank                 = "training_rank"
	RingGeneration       = "training_ring_generation"
	RingGenerationAge    = "training_ring_generation_age_seconds"
	RingChanges          = "training_ring_changes_total"
	RingChangeSeconds    = "training_ring_change_seconds_total"
	LostSteps            = "training_lost_steps_total"
	ComputeSeconds       = "training_compute_seconds_total"
	CommunicationSeconds = "training_communication_seconds_total"
	DataWaitSeconds      = "training_data_wait_seconds_total"
)

// Bounds within which the exporter reads a page. One that breaks a bound is refused as a whole.
const (
	MaxBody       = 256 << 10 // bytes
	MaxSamples    = 200
	MaxLabels     = 16         // of one sample
	MaxNameBytes  = 64         // of a family or label
	MaxValueBytes = 128        // of a label's value
	MaxNumber     = 1e15       // a sample is within 0 and this
	MinPort       = 1024       // of annotation capstan.dev/stats-port
	MaxPathBytes  = 64         // of annotation capstan.dev/stats-path
	Path          = "/metrics" // where a page lies if no annotation says otherwise
)

// Kind is what a family is.
type Kind string

// The kinds of families on a page.
const (
	Counter Kind = "counter"
	Gauge   Kind = "gauge"
)

// Family is one name of the page.
type Family struct {
	Name   string
	Kind   Kind
	Help   string
	Labels []string // that each of its samples carries, in this order
}

var families = []Family{
	{CommunicationSeconds, Counter, "Seconds spent exchanging gradients with other workers.", nil},
	{ComputeSeconds, Counter, "Seconds spent computing.", nil},
	{DataWaitSeconds, Counter, "Seconds spent waiting for samples.", nil},
	{LostSteps, Counter, "Steps of the ring that were begun and never committed.", nil},
	{Rank, Gauge, "This worker's rank in its ring; 0 is the lowest.", nil},
	{RingChangeSeconds, Counter, "Seconds during which the ring was changing and did not step.", nil},
	{RingChanges, Counter, "Changes of the ring's membership, by reason.", []string{"reason"}},
	{RingGeneration, Gauge, "Number of the ring's membership; it grows with every change.", nil},
	{RingGenerationAge, Gauge, "Seconds since this generation of the ring began.", nil},
	{Samples, Counter, "Samples that this worker trained on, each counted once in the whole job.", nil},
	{StepDuration, Gauge, "Seconds that the newest step took.", nil},
	{Steps, Counter, "Steps done. A ring's members count the same steps: aggregate by max.", nil},
	{WorldSize, Gauge, "Workers in the ring.", nil},
}

// Families are all families of the page, sorted by name: the list of what the exporter lets through.
func Families() []Family { return slices.Clone(families) }

// Names are the names of [Families].
func Names() []string {
	names := make([]string, len(families))
	for i, f := range families {
		names[i] = f.Name
	}
	return names
}

// Sample is one number of the page.
type Sample struct {
	Name   string
	Value  float64  // finite, 0 to MaxNumber
	Labels []string // values, in the order of Family.Labels
}

// Write writes the samples as the Prometheus text format 0.0.4, grouped by family. It writes all or nothing: an error tells
// which sample the exporter would refuse, and why.
func Write(w io.Writer, samples []Sample) error {
	if len(samples) > MaxSamples {
		return fmt.Errorf("write a stats page: %d samples, at most %d", len(samples), MaxSamples)
	}
	for _, s := range samples {
		if err := check(s); err != nil {
			return fmt.Errorf("write a stats page: %w", err)
		}
	}
	var b bytes.Buffer
	for _, f := range families {
		seen := map[string]bool{}
		for _, s := range samples {
			if s.Name != f.Name {
				continue
			}
			key := strings.Join(s.Labels, "\x00")
			if seen[key] {
				return fmt.Errorf("write a stats page: %s%v twice", s.Name, s.Labels)
			}
			if len(seen) == 0 {
				fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", f.Name, f.Help, f.Name, f.Kind)
			}
			seen[key] = true
			b.WriteString(f.Name)
			for i, label := range f.Labels {
				b.WriteString(separator(i))
				b.WriteString(label)
				b.WriteString(`="`)
				b.WriteString(escape.Replace(s.Labels[i]))
				b.WriteByte('"')
			}
			if len(f.Labels) > 0 {
				b.WriteByte('}')
			}
			b.WriteByte(' ')
			b.WriteString(strconv.FormatFloat(s.Value, 'g', -1, 64))
			b.WriteByte('\n')
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

func separator(i int) string {
	if i == 0 {
		return "{"
	}
	return ","
}

var escape = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

func check(s Sample) error {
	i := slices.IndexFunc(families, func(f Family) bool { return f.Name == s.Name })
	if i < 0 {
		return fmt.Errorf("%q is no name of the page; there are %s", s.Name, strings.Join(Names(), ", "))
	}
	if want := families[i].Labels; len(s.Labels) != len(want) {
		return fmt.Errorf("%s has %d label values, want one for each of %v", s.Name, len(s.Labels), want)
	}
	for _, v := range s.Labels {
		if len(v) > MaxValueBytes {
			return fmt.Errorf("%s has a label value of %d bytes, at most %d", s.Name, len(v), MaxValueBytes)
		}
	}
	if math.IsNaN(s.Value) || s.Value < 0 || s.Value > MaxNumber {
		return fmt.Errorf("%s is %v, want 0 to %g; leave out what is not known", s.Name, s.Value, MaxNumber)
	}
	return nil
}

// Handler serves the page. samples is called for each request, maybe by several at once, and returns what is known at that moment.
func Handler(samples func() []Sample) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		var b bytes.Buffer
		if err := Write(&b, samples()); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		w.Write(b.Bytes())
	})
}

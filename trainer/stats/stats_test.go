package stats

import (
	"bytes"
	"flag"
	"math"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestPage(t *testing.T) {
	page := Handler(func() []Sample {
		return []Sample{
			{Name: Samples, Value: 12345},
			{Name: RingChanges, Value: 2, Labels: []string{"joined"}},
			{Name: StepDuration, Value: 0.0625},
			{Name: RingChanges, Value: 1, Labels: []string{"odd \"\\\nreason"}},
			{Name: Steps, Value: 771},
		}
	})
	w := httptest.NewRecorder()
	page.ServeHTTP(w, httptest.NewRequest("GET", Path, nil))
	const golden = "testdata/page.txt"
	if *update {
		if err := os.WriteFile(golden, w.Body.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), w.Body.String()); diff != "" {
		t.Errorf("page (-want +got):\n%s", diff)
	}
	// Prometheus' own parser reads the same numbers.
	parser := expfmt.NewTextParser(model.UTF8Validation)
	parsed, err := parser.TextToMetricFamilies(w.Body)
	if err != nil {
		t.Fatal(err)
	}
	if got := parsed[RingChanges].Metric[1].Label[0].GetValue(); got != "odd \"\\\nreason" {
		t.Errorf("label came back as %q", got)
	}
	if got := parsed[Samples].Metric[0].Counter.GetValue(); got != 12345 {
		t.Errorf("%s came back as %v", Samples, got)
	}
}

func TestWriteRefuses(t *testing.T) {
	refuses := func(want string, samples ...Sample) {
		t.Helper()
		var b bytes.Buffer
		if err := Write(&b, samples); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Write(%.3v…) = %v, want an error with %q", samples, err, want)
		}
		if b.Len() > 0 {
			t.Errorf("Write(%.3v…) wrote %q beside its error", samples, b.String())
		}
	}
	refuses("no name of the page", Sample{Name: "pod_name", Value: 1})
	refuses("leave out what is not known", Sample{Name: Steps, Value: math.NaN()})
	refuses("want 0 to 1e+15", Sample{Name: Steps, Value: -1})
	refuses("want 0 to 1e+15", Sample{Name: Steps, Value: math.Inf(1)})
	refuses("twice", Sample{Name: Steps, Value: 1}, Sample{Name: Steps, Value: 2})
	refuses("label values", Sample{Name: RingChanges, Value: 1})
	refuses("label values", Sample{Name: Steps, Value: 1, Labels: []string{"victim"}})
	refuses("129 bytes", Sample{Name: RingChanges, Value: 1, Labels: []string{strings.Repeat("x", 129)}})
	refuses("201 samples", slices.Repeat([]Sample{{Name: Steps}}, 201)...)
}

// The whole page fits the bounds of its reader, and no family carries an identity.
func TestFamilies(t *testing.T) {
	if !slices.IsSorted(Names()) {
		t.Errorf("Names() = %v, want them sorted", Names())
	}
	for _, f := range Families() {
		if f.Help == "" || !strings.HasPrefix(f.Name, "training_") || len(f.Name) > MaxNameBytes || len(f.Labels) > MaxLabels {
			t.Errorf("family %+v: want a help, the prefix training_ and the reader's bounds", f)
		}
		if strings.HasSuffix(f.Name, "_total") != (f.Kind == Counter) {
			t.Errorf("family %s is a %s", f.Name, f.Kind)
		}
		for _, l := range f.Labels {
			if slices.Contains([]string{"namespace", "pod", "pod_uid", "container", "node", "uuid"}, l) {
				t.Errorf("family %s carries identity %q, which only the kubelet gives", f.Name, l)
			}
		}
	}
}

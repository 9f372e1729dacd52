package report

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReport(t *testing.T) {
	figures := []Figure{
		AtMost("exporter_rss_mib", 31.25, "MiB", 40, "after 100000 cycles"),
		AtMost("exporter_cpu_percent", 1.5, "%", 1, ""),
		AtLeast("allreduce_16mib_fraction_of_loopback", 0.75, "ratio", 0.7, ""),
	}
	var table strings.Builder
	if err := Print(&table, "figure", figures); err != nil {
		t.Fatal(err)
	}
	want := `figure                                value  budget  unit   holds  
exporter_rss_mib                      31.2   40      MiB    yes    after 100000 cycles
exporter_cpu_percent                  1.5    1       %      NO     
allreduce_16mib_fraction_of_loopback  0.75   0.7     ratio  yes    
2 of 3 budgets hold
`
	if diff := cmp.Diff(want, table.String()); diff != "" {
		t.Errorf("table (-want +got)\n%s", diff)
	}
	path := filepath.Join(t.TempDir(), "bench", "x.json")
	if err := Write(path, figures); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got []Figure
	if err := json.Unmarshal(b, &got); err != nil || !cmp.Equal(figures, got) {
		t.Errorf("read back %v, %v", got, err)
	}
	if err := Write(path, []Figure{{Name: "x", Value: math.NaN()}}); err == nil || !strings.Contains(err.Error(), "x is NaN") {
		t.Errorf("NaN: %v, want an error", err)
	}
}

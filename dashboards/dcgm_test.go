package main

import (
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/promql"

	"github.com/capstan-gpu/capstan/adapter/store"
)

// TestDashboard12239 evaluates what Grafana's dashboard 12239 (NVIDIA DCGM Exporter) asks for, as it asks, on the page that --compat=dcgm
// serves. The panels' queries are the dashboard's; instance and gpu are its variables at "All".
func TestDashboard12239(t *testing.T) {
	text, err := os.ReadFile("../exporter/testdata/golden/dcgm.prom")
	if err != nil {
		t.Fatal(err)
	}
	start := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	samples := store.New(store.Config{Retention: time.Hour})
	var batch []store.Sample
	for parser := textparse.NewPromParser(text, labels.NewSymbolTable(), false); ; {
		entry, err := parser.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if entry != textparse.EntrySeries {
			continue
		}
		var series labels.Labels
		_, _, value := parser.Series()
		parser.Labels(&series)
		scraped := labels.NewBuilder(series).Set("instance", "node-1:9400").Set("job", "dcgm-exporter").Labels() // as a scrape adds them
		batch = append(batch, store.Sample{Labels: scraped, Value: value, At: start})
	}
	samples.Append(batch)
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 100_000, Timeout: time.Minute, LookbackDelta: 5 * time.Minute})
	for expr, want := range map[string]int{
		`DCGM_FI_DEV_GPU_TEMP{instance=~".+", gpu=~".+"}`:                   2,
		`avg(DCGM_FI_DEV_GPU_TEMP{instance=~".+", gpu=~".+"})`:              1,
		`DCGM_FI_DEV_POWER_USAGE{instance=~".+", gpu=~".+"}`:                2,
		`sum(DCGM_FI_DEV_POWER_USAGE{instance=~".+", gpu=~".+"})`:           1,
		`DCGM_FI_DEV_SM_CLOCK{instance=~".+", gpu=~".+"} * 1000000`:         2,
		`DCGM_FI_DEV_GPU_UTIL{instance=~".+", gpu=~".+"}`:                   4, // two GPUs, one that is divided, and its instance
		`DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{instance=~".+", gpu=~".+"}`:        2,
		`DCGM_FI_DEV_FB_USED{instance=~".+", gpu=~".+"}`:                    3,
		`avg by (modelName) (DCGM_FI_DEV_MEM_CLOCK{Hostname=~"node-.*"})`:   1,
		`DCGM_FI_DEV_XID_ERRORS{pod!=""} > 0 or DCGM_FI_DEV_XID_ERRORS > 0`: 1,
	} {
		q, err := engine.NewInstantQuery(t.Context(), samples, nil, expr, start)
		if err != nil {
			t.Fatalf("%s: %v", expr, err)
		}
		result := q.Exec(t.Context())
		vector, err := result.Vector()
		if err != nil || len(vector) != want {
			t.Errorf("%s has %d series, %v; want %d", expr, len(vector), err, want)
		}
		q.Close()
	}
}

package remote

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"

	"github.com/capstan-gpu/capstan/adapter/engine"
	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/reading"
)

// exporter serves a page about pods that are busy to a constant share, as Capstan's exporter would.
type exporter struct {
	*httptest.Server
	begin time.Time

	mu     sync.Mutex
	shares map[string]float64 // by pod UID; negative = it does not move
}

func newExporter(t *testing.T, shares map[string]float64) *exporter {
	e := &exporter{begin: time.Now(), shares: shares}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4")
		for _, name := range []string{metricname.PodGPUBusySeconds, metricname.PodGPUObservedSeconds} {
			fmt.Fprintf(w, "# TYPE %s counter\n", name)
			for _, s := range e.samples(time.Now()) {
				if s.Labels.Get(model.MetricNameLabel) == name {
					fmt.Fprintf(w, "%s{namespace=%q,pod=%q,pod_uid=%q,shared=\"false\"} %v\n", name, s.Labels.Get("namespace"), s.Labels.Get("pod"), s.Labels.Get("pod_uid"), s.Value)
				}
			}
		}
	}))
	t.Cleanup(e.Close)
	return e
}

// samples is the page at a moment.
func (e *exporter) samples(now time.Time) (page []store.Sample) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(e.shares)) {
		share, observed := e.shares[uid], now.Sub(e.begin).Seconds()
		if share < 0 {
			observed, share = 7, 0.5
		}
		for name, value := range map[string]float64{metricname.PodGPUBusySeconds: share * observed, metricname.PodGPUObservedSeconds: observed} {
			page = append(page, store.Sample{At: now, Value: value, Labels: labels.FromStrings(model.MetricNameLabel, name,
				metricname.Namespace, "training", metricname.Pod, "web-"+uid, metricname.PodUID, uid, metricname.Shared, "false")})
		}
	}
	return page
}

func (e *exporter) remove(uid string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.shares, uid)
}

// scrapeConfig scrapes once a second.
func scrapeConfig(e *exporter, extra string) string {
	return fmt.Sprintf(`
global:
  scrape_interval: 1s
scrape_configs:
- job_name: capstan
  static_configs:
  - targets: [%q]
    labels: {namespace: capstan-system, pod: exporter-x}
%s`, strings.TrimPrefix(e.URL, "http://"), extra)
}

// remotely reads a rule by an engine. notes collects its remarks.
func remotely(t *testing.T, r rules.Rule, url string, notes *[]string) reading.Reader {
	t.Helper()
	remote, err := engine.NewRemote(engine.RemoteConfig{URLs: []string{url}, Logger: slog.New(slog.DiscardHandler), Annotated: func(_ string, said []string) {
		if notes != nil {
			*notes = append(*notes, said...)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	return reading.Reader{Rule: r, Value: remote.Func(r.MaxAge), Freshness: remote.Func(max(r.HoldFor, r.MaxAge))}
}

// fleetOf is a workload of these pods.
func fleetOf(uids ...string) *reading.Fleet {
	w := rules.Workload{Namespace: "training", Name: "web", UID: "w"}
	for _, uid := range uids {
		w.Pods = append(w.Pods, rules.Pod{UID: uid, Name: "web-" + uid})
	}
	return reading.NewFleet([]rules.Workload{w}, nil)
}

// values are the readings that the policy could serve.
func values(f reading.Found) map[string]float64 {
	out := map[string]float64{}
	for uid, r := range f.Readings {
		if !math.IsNaN(r.Value) && !math.IsInf(r.Value, 0) {
			out[uid] = r.Value
		}
	}
	return out
}

// The shipped rule gives the same by an engine that scrapes the same page, which is then killed and comes back.
func TestScraped(t *testing.T) {
	required(t)
	for _, b := range []binary{prometheus, victoriaMetrics} {
		t.Run(b.name, func(t *testing.T) {
			page := newExporter(t, map[string]float64{"busy": 0.95, "half": 0.5, "idle": 0, "frozen": -1, "leaver": 0.3})
			p := start(t, b, scrapeConfig(page, "  honor_labels: true\n"))
			rule := rules.Default()[0]
			rule.Window, rule.MaxAge, rule.HoldFor = 15*time.Second, 5*time.Second, 10*time.Second
			fleet := fleetOf("busy", "half", "idle", "frozen", "leaver")
			s := store.New(store.Config{})
			embedded, remote := reading.Embedded(rule, s), remotely(t, rule, p.url(), nil)
			compare := func(want map[string]float64) error {
				now := time.Now()
				s.Scrape("node-1", now, page.samples(now))
				ours, theirs := embedded.Read(t.Context(), fleet, now), remote.Read(t.Context(), fleet, now)
				if err := errors.Join(ours.Err, theirs.Err); err != nil {
					return err
				}
				for name, got := range map[string]map[string]float64{"embedded": values(ours), "remote": values(theirs)} {
					for uid, v := range want {
						if have, ok := got[uid]; !ok || math.Abs(have-v) > 0.01 {
							return fmt.Errorf("%s: %s is %v, %v; want %v", name, uid, have, ok, v)
						}
					}
					if len(got) != len(want) {
						return fmt.Errorf("%s: %v; want %v", name, got, want)
					}
				}
				for uid := range want {
					// The newest scrape is at most a second old on both sides; the rest is this machine's.
					if d := now.Sub(theirs.Fresh[uid]); d < 0 || d > 4*time.Second {
						return fmt.Errorf("the newest sample of %s is %s old", uid, d)
					}
				}
				if len(ours.Fresh) != len(theirs.Fresh) {
					return fmt.Errorf("the ages are of %v and %v", ours.Fresh, theirs.Fresh)
				}
				return nil
			}
			all := map[string]float64{"busy": 95, "half": 50, "idle": 0, "leaver": 30} // frozen is 0/0
			eventually(t, 40*time.Second, func() error { return compare(all) })

			// Who leaves the page is at once no longer fresh, on both sides, though rates go on for a window.
			page.remove("leaver")
			eventually(t, 20*time.Second, func() error {
				now := time.Now()
				s.Scrape("node-1", now, page.samples(now))
				ours, theirs := embedded.Read(t.Context(), fleet, now), remote.Read(t.Context(), fleet, now)
				if !ours.Fresh["leaver"].IsZero() || !theirs.Fresh["leaver"].IsZero() || theirs.Err != nil {
					return fmt.Errorf("%v and %v, %v", ours.Fresh, theirs.Fresh, theirs.Err)
				}
				return nil
			})

			p.kill()
			found := remote.Read(t.Context(), fleet, time.Now())
			if found.Err == nil || !strings.Contains(found.Err.Error(), p.url()+": no connection") || len(found.Readings) > 0 || len(found.Failed) != 1 {
				t.Errorf("without an engine: %+v", found)
			}
			p.run(t)
			delete(all, "leaver")
			eventually(t, 60*time.Second, func() error { return compare(all) })
		})
	}
}

// A scrape configuration without honor_labels is told of, with the fix.
func TestExportedLabels(t *testing.T) {
	required(t)
	for _, b := range []binary{prometheus, victoriaMetrics} {
		t.Run(b.name, func(t *testing.T) {
			page := newExporter(t, map[string]float64{"busy": 0.95})
			p := start(t, b, scrapeConfig(page, ""))
			rule := rules.Default()[0]
			rule.Window, rule.MaxAge = 10*time.Second, 5*time.Second
			var notes []string
			remote := remotely(t, rule, p.url(), &notes)
			eventually(t, 40*time.Second, func() error {
				found := remote.Read(t.Context(), fleetOf("busy"), time.Now())
				if v := values(found)["busy"]; math.Abs(v-95) > 0.01 || found.Err != nil {
					return fmt.Errorf("%v, %v", found.Readings, found.Err)
				}
				return nil
			})
			if len(notes) == 0 || !strings.Contains(notes[0], "elements carry exported_namespace, exported_pod") || !strings.Contains(notes[0], "honor_labels: true") {
				t.Errorf("notes: %q", notes)
			}
		})
	}
}

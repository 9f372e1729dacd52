package engine_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"

	"github.com/capstan-gpu/capstan/adapter/engine"
	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/reading"
)

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// api is an engine that looks back five minutes, whatever it is told, as one that does not know the arguments.
type api struct {
	*httptest.Server
	asked atomic.Int32
}

func newAPI(t *testing.T, q storage.Queryable) *api {
	t.Helper()
	eval := engine.Embedded(q, engine.Config{Lookback: 5 * time.Minute})
	a := &api{}
	a.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.asked.Add(1)
		seconds, err := strconv.ParseFloat(r.FormValue("time"), 64)
		if err != nil {
			t.Error(err)
		}
		points, err := eval(r.Context(), r.FormValue("query"), time.UnixMilli(int64(math.Round(seconds*1000))))
		w.Header().Set("Content-Type", "application/json")
		if err != nil {
			w.WriteHeader(http.StatusUnprocessableEntity)
			json.NewEncoder(w).Encode(map[string]string{"status": "error", "errorType": "execution", "error": err.Error()})
			return
		}
		elements := []map[string]any{}
		for _, p := range points {
			elements = append(elements, map[string]any{"metric": p.Labels.Map(), "value": []any{seconds, model.SampleValue(p.Value).String()}})
		}
		json.NewEncoder(w).Encode(map[string]any{"status": "success", "data": map[string]any{"resultType": "vector", "result": elements}})
	}))
	t.Cleanup(a.Close)
	return a
}

// reader reads a rule by a remote engine.
func reader(t testing.TB, r rules.Rule, cfg engine.RemoteConfig) reading.Reader {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	remote, err := engine.NewRemote(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return reading.Reader{Rule: r, Value: remote.Func(r.MaxAge), Freshness: remote.Func(max(r.HoldFor, r.MaxAge))}
}

// level is a rule by an instant selector, whose look-back is the engine's.
var level = rules.Rule{
	Metric: "level", Unit: rules.Percent, Expr: "level", Freshness: "level", Window: 30 * time.Second, MaxAge: 15 * time.Second,
	HoldFor: 75 * time.Second, JoinFor: time.Minute, Missing: rules.Hold, Per: rules.PerPod,
}

// workload is one of pods with these UIDs, that have been Ready for long.
func workload(namespace string, uids ...string) rules.Workload {
	w := rules.Workload{Namespace: namespace, Name: "web", UID: namespace}
	for i, uid := range uids {
		w.Pods = append(w.Pods, rules.Pod{UID: uid, Name: fmt.Sprintf("web-%d", i), Node: "node-1", Phase: "Running", Ready: true, ReadySince: noon.Add(-time.Hour), GPUs: 1})
	}
	return w
}

// served is what the policy makes of what is found for a workload that has not changed for a window.
func served(found reading.Found, r rules.Rule, w rules.Workload) rules.Answer {
	_, m := found.Decide(r, w, rules.Memory{}, noon.Add(-r.Window))
	a, _ := found.Decide(r, w, m, noon)
	return a
}

func sample(name, namespace, uid string, value float64, at time.Time) store.Sample {
	return store.Sample{Labels: labels.FromStrings(model.MetricNameLabel, name, metricname.Namespace, namespace, metricname.PodUID, uid), Value: value, At: at}
}

// A series that stopped two minutes ago is found by an engine that looks back five, with its true age, and is not served.
func TestStoppedSeriesIsNotServed(t *testing.T) {
	s := store.New(store.Config{Retention: time.Hour})
	s.Append([]store.Sample{sample("level", "n", "stopped", 50, noon.Add(-2*time.Minute)), sample("level", "n", "fresh", 60, noon.Add(-2*time.Second))})
	s.Scrape("gone", noon.Add(-9*time.Second), []store.Sample{sample("level", "n", "marked", 70, noon.Add(-9*time.Second))})
	s.Scrape("gone", noon.Add(-4*time.Second), nil)
	server := newAPI(t, s)
	list := []rules.Workload{workload("n", "stopped"), workload("n", "fresh"), workload("n", "marked")}
	found := reader(t, level, engine.RemoteConfig{URLs: []string{server.URL}}).Read(t.Context(), reading.NewFleet(list, nil), noon)
	if found.Err != nil || server.asked.Load() != 2 {
		t.Fatalf("%v, %d queries; want none and one for the values and one for their ages", found.Err, server.asked.Load())
	}
	if r := found.Readings["stopped"]; r.Value != 50 || noon.Sub(r.At) != 2*time.Minute {
		t.Errorf("what stopped is found as %+v: the test shows nothing", r)
	}
	if a := served(found, level, list[0]); a.Err == nil || !strings.Contains(a.Err.Error(), "2m0s") {
		t.Errorf("what stopped two minutes ago: %+v; want an error that says so", a)
	}
	if a := served(found, level, list[1]); a.Err != nil || len(a.Items) != 1 || a.Items[0].Value != 60 || noon.Sub(a.Items[0].At) != 2*time.Second {
		t.Errorf("what is fresh: %+v", a)
	}
	if a := served(found, level, list[2]); a.Err == nil {
		t.Errorf("what left its page: %+v", a)
	}
}

// One tenant's duplicate fails the query for the fleet, and by HTTP, too, costs only its own namespace the signal.
func TestReadByNamespace(t *testing.T) {
	s := store.New(store.Config{})
	at := noon.Add(-time.Second)
	twin := func(x string) store.Sample {
		b := sample("b", "bad", "u2", 2, at)
		b.Labels = labels.NewBuilder(b.Labels).Set("x", x).Labels()
		return b
	}
	s.Append([]store.Sample{sample("a", "good", "u1", 40, at), sample("b", "good", "u1", 2, at), sample("a", "bad", "u2", 40, at), twin("1"), twin("2")})
	server := newAPI(t, s)
	r := level
	r.Expr, r.Freshness = "a / on (pod_uid) group_left b", "a"
	list := []rules.Workload{workload("good", "u1"), workload("bad", "u2")}
	found := reader(t, r, engine.RemoteConfig{URLs: []string{server.URL}}).Read(t.Context(), reading.NewFleet(list, nil), noon)
	if found.Err == nil || len(found.Failed) != 1 || server.asked.Load() != 6 {
		t.Errorf("%v, %v, %d queries; want an error, that of namespace bad, and two queries each", found.Err, found.Failed, server.asked.Load())
	}
	if a := served(found, r, list[0]); a.Err != nil || len(a.Items) != 1 || a.Items[0].Value != 20 {
		t.Errorf("good: %+v", a)
	}
	if a := served(found, r, list[1]); a.Err == nil || !strings.Contains(a.Err.Error(), server.URL+": cannot evaluate it, 422") {
		t.Errorf("bad: %+v", a)
	}
}

// An engine that is gone costs one request for all namespaces, all of them know why, and when it is back it is asked again.
func TestReadWithoutEngine(t *testing.T) {
	var asked atomic.Int32
	var back atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if !back.Load() {
			http.Error(w, "starting", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, `{"status":"success","data":{"resultType":"vector","result":[]}}`)
	}))
	defer server.Close()
	var list []rules.Workload
	for i := range 50 {
		list = append(list, workload(fmt.Sprintf("n%d", i), fmt.Sprintf("u%d", i)))
	}
	read := reader(t, level, engine.RemoteConfig{URLs: []string{server.URL}})
	found := read.Read(t.Context(), reading.NewFleet(list, nil), noon)
	if asked.Load() != 1 || len(found.Failed) != 50 || !strings.Contains(found.Failed["n7"].Error(), "answers 503 Service Unavailable (starting)") {
		t.Errorf("%d requests, %d namespaces failed, %v", asked.Load(), len(found.Failed), found.Failed["n7"])
	}
	back.Store(true)
	if found = read.Read(t.Context(), reading.NewFleet(list, nil), noon.Add(5*time.Second)); found.Err != nil || asked.Load() != 3 {
		t.Errorf("it is back: %v after %d requests", found.Err, asked.Load())
	}
}

// A tick's deadline bounds what is asked namespace by namespace, however many there are.
func TestReadByNamespaceEndsWithTheTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		hangs := engine.RoundTripFunc(func(r *http.Request) (*http.Response, error) {
			asked++
			if err := r.ParseForm(); err != nil {
				return nil, err
			}
			if !strings.Contains(r.PostForm.Get("query"), "namespace=") {
				duplicate := []byte(`{"status":"error","errorType":"execution","error":"duplicate"}`)
				return &http.Response{StatusCode: http.StatusUnprocessableEntity, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(duplicate))}, nil
			}
			<-r.Context().Done()
			return nil, r.Context().Err()
		})
		var list []rules.Workload
		for i := range 20 {
			list = append(list, workload(fmt.Sprintf("n%d", i), fmt.Sprintf("u%d", i)))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		begin := time.Now()
		found := reader(t, level, engine.RemoteConfig{URLs: []string{"http://a"}, Transport: hangs}).Read(ctx, reading.NewFleet(list, nil), noon)
		// Both queries of the fleet, two time-outs of 2 s, and the one that the tick ends; what comes after is not sent.
		if took := time.Since(begin); took != 5*time.Second || asked > 5 || len(found.Failed) != 20 || len(found.Readings) > 0 {
			t.Errorf("%s, %d requests, %d failed", took, asked, len(found.Failed))
		}
		if err := found.Failed["n9"]; !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
}

// bodies makes a transport that answers queries of ages and of values with these.
type bodies struct {
	status       int
	values, ages []byte
}

func (b bodies) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.ParseForm(); err != nil {
		return nil, err
	}
	body := b.values
	if strings.Contains(r.PostForm.Get("query"), "timestamp(") {
		body = b.ages
	}
	return &http.Response{StatusCode: b.status, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(body))}, nil
}

// Whatever an engine answers: no panic; elements or an error; each with its pod's UID; and nothing reaches the HPA that is no percentage of
// a known pod, or is too old.
func FuzzAnswer(f *testing.F) {
	files, err := filepath.Glob("testdata/remote/*.txt")
	if err != nil || len(files) == 0 {
		f.Fatal(files, err)
	}
	ages := []byte(fmt.Sprintf(`{"status":"success","data":{"resultType":"vector","result":[{"metric":{"pod_uid":"u1"},"value":[%d,"%d"]},{"metric":{"pod_uid":"u2"},"value":[%[1]d,"%[2]d"]}]}}`, noon.Unix(), noon.Unix()-3))
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		sent, _, _ := strings.Cut(string(data), "\n---\n")
		_, body, _ := strings.Cut(sent, "\n\n")
		f.Add(uint16(200), []byte(body), ages)
		f.Add(uint16(422), []byte(body), ages)
		f.Add(uint16(200), ages, []byte(body))
	}
	list := []rules.Workload{workload("n", "u1"), workload("m", "u2")}
	fleet := reading.NewFleet(list, nil)
	f.Fuzz(func(t *testing.T, status uint16, values, ages []byte) {
		read := reader(t, level, engine.RemoteConfig{URLs: []string{"http://engine"}, Transport: bodies{200 + int(status)%400, values, ages}})
		for _, eval := range []engine.Func{read.Value, read.Freshness} {
			points, err := eval(t.Context(), "level", noon)
			if err != nil && points != nil {
				t.Errorf("%v and %v", points, err)
			}
			seen := map[string]bool{}
			for _, p := range points {
				if p.Labels.Get(metricname.PodUID) == "" || seen[p.Labels.String()] {
					t.Errorf("%s has no pod, or is there twice", p.Labels)
				}
				seen[p.Labels.String()] = true
			}
		}
		found := read.Read(t.Context(), fleet, noon)
		for _, w := range list {
			a := served(found, level, w)
			if (a.Err == nil) == (len(a.Items) == 0) {
				t.Errorf("items %v and error %v", a.Items, a.Err)
			}
			for _, item := range append(a.Items, a.Fresh...) {
				if !(item.Value >= 0 && item.Value <= 100) || item.PodUID != w.Pods[0].UID || item.Pod == "" || noon.Sub(item.At) > level.HoldFor {
					t.Errorf("%+v is served", item)
				}
			}
		}
	})
}

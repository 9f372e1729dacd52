package remote

import (
	"bytes"
	varint "encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/prompb"

	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/reading"
)

// history is what one worker's exporter said, oldest first.
type history struct {
	uid    string
	steady bool // one share, without a reset or a pause: every way to make a rate gives the same
	share  float64
	points []point
}

type point struct {
	at             time.Time
	busy, observed float64
	stale          bool // it is the marker that the series has left its page
}

// histories are of workers of all kinds: joiners and leavers, frozen pages, restarts, gaps, jitter, a single scrape.
func histories(random *rand.Rand, n int, now time.Time) (all []history) {
	for i := range n {
		h := history{uid: fmt.Sprintf("u%d", i), steady: random.IntN(3) == 0, share: math.Round(100*random.Float64()) / 100}
		from, to := now.Add(-150*time.Second), now.Add(-time.Duration(random.IntN(3000))*time.Millisecond)
		if random.IntN(4) == 0 { // a joiner
			from = now.Add(-time.Duration(random.IntN(90)) * time.Second)
		}
		leaves, marked := random.IntN(4) == 0, random.IntN(2) == 0
		if leaves {
			to = now.Add(-time.Duration(random.IntN(120)) * time.Second)
		}
		var busy, observed float64
		share := h.share
		for at := from; at.Before(to); {
			step := 5 * time.Second
			frozen := false
			if !h.steady {
				step += time.Duration(random.IntN(2000)-1000) * time.Millisecond
				switch random.IntN(12) {
				case 0:
					busy, observed = 0, 0 // the exporter restarts
				case 1:
					step += time.Duration(random.IntN(30)) * time.Second // a gap
				case 2, 3:
					frozen = true
				}
				share = random.Float64()
			}
			if !frozen {
				busy, observed = busy+share*step.Seconds(), observed+step.Seconds()
			}
			h.points = append(h.points, point{at: at.Truncate(time.Millisecond), busy: busy, observed: observed})
			at = at.Add(step)
		}
		if leaves && marked && len(h.points) > 0 {
			h.points = append(h.points, point{at: h.points[len(h.points)-1].at.Add(time.Second), stale: true})
		}
		all = append(all, h)
	}
	return all
}

// left gives the time of the newest sample of one that by then has left its page, with a marker.
func (h history) left(by time.Time) (last time.Time, marked bool) {
	n := len(h.points)
	if n < 2 || !h.points[n-1].stale || h.points[n-1].at.After(by) {
		return time.Time{}, false
	}
	return h.points[n-2].at, true
}

// series are a history's, with a value for each point.
func (h history) series() map[string]func(point) float64 {
	marked := func(f func(point) float64) func(point) float64 {
		return func(p point) float64 {
			if p.stale {
				return math.Float64frombits(value.StaleNaN)
			}
			return f(p)
		}
	}
	return map[string]func(point) float64{
		metricname.PodGPUBusySeconds:     marked(func(p point) float64 { return p.busy }),
		metricname.PodGPUObservedSeconds: marked(func(p point) float64 { return p.observed }),
	}
}

func (h history) labels(name string) labels.Labels {
	return labels.FromStrings(model.MetricNameLabel, name, metricname.Namespace, "training", metricname.Pod, "web-"+h.uid, metricname.PodUID, h.uid, metricname.Shared, "false")
}

// write sends histories to an engine by remote write.
func write(t *testing.T, target string, all []history) {
	t.Helper()
	var request prompb.WriteRequest
	for _, h := range all {
		for name, of := range h.series() {
			series := prompb.TimeSeries{Labels: prompb.FromLabels(h.labels(name), nil)}
			for _, p := range h.points {
				series.Samples = append(series.Samples, prompb.Sample{Timestamp: p.at.UnixMilli(), Value: of(p)})
			}
			request.Timeseries = append(request.Timeseries, series)
		}
	}
	data, err := request.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequest(http.MethodPost, target+"/api/v1/write", bytes.NewReader(snappy(data)))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-protobuf")
	r.Header.Set("Content-Encoding", "snappy")
	r.Header.Set("X-Prometheus-Remote-Write-Version", "0.1.0")
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if body, _ := io.ReadAll(response.Body); response.StatusCode/100 != 2 {
		t.Fatalf("%s: %s", response.Status, body)
	}
}

// snappy packs data without making it smaller: the format's block of literals.
func snappy(data []byte) []byte {
	out := varint.AppendUvarint(nil, uint64(len(data)))
	for chunk := range slices.Chunk(data, 1<<16) {
		out = append(out, 61<<2) // a literal whose length less one follows in two bytes
		out = varint.LittleEndian.AppendUint16(out, uint16(len(chunk)-1))
		out = append(out, chunk...)
	}
	return out
}

// The same samples give the same readings at every moment: by Prometheus exactly, whatever the history; by VictoriaMetrics, which makes
// rates in another way, where the share is steady. Ages are the same to the millisecond.
func TestWritten(t *testing.T) {
	required(t)
	const workers = 300
	for _, b := range []exactness{{prometheus, 1e-9}, {victoriaMetrics, 0.01}} {
		t.Run(b.name, func(t *testing.T) {
			p := start(t, b.binary, "scrape_configs: []\n")
			now := time.Now().Truncate(time.Millisecond)
			all := histories(rand.New(rand.NewPCG(4, 2)), workers, now)
			write(t, p.url(), all)
			s := store.New(store.Config{Retention: time.Hour})
			var uids []string
			for _, h := range all {
				uids = append(uids, h.uid)
				for name, of := range h.series() {
					for _, p := range h.points {
						s.Append([]store.Sample{{Labels: h.labels(name), Value: of(p), At: p.at}})
					}
				}
			}
			fleet := fleetOf(uids...)
			rule := rules.Default()[0]
			embedded, remote := reading.Embedded(rule, s), remotely(t, rule, p.url(), nil)
			// What is written becomes visible within a second or two.
			eventually(t, 20*time.Second, func() error {
				ours, theirs := embedded.Read(t.Context(), fleet, now), remote.Read(t.Context(), fleet, now)
				if theirs.Err != nil || len(theirs.Fresh) < len(ours.Fresh) {
					return fmt.Errorf("%d ages of %d, %v", len(theirs.Fresh), len(ours.Fresh), theirs.Err)
				}
				return nil
			})
			if b.binary == victoriaMetrics {
				hides(t, p.url())
			}
			compared := 0
			for _, back := range []time.Duration{0, 1300 * time.Millisecond, 7 * time.Second, 31 * time.Second, 64 * time.Second} {
				at := now.Add(-back)
				ours, theirs := embedded.Read(t.Context(), fleet, at), remote.Read(t.Context(), fleet, at)
				if ours.Err != nil || theirs.Err != nil {
					t.Fatalf("%v, %v", ours.Err, theirs.Err)
				}
				a, z := values(ours), values(theirs)
				for _, h := range all {
					fresh := ours.Fresh[h.uid]
					if last, marked := h.left(at); marked && b.binary == victoriaMetrics && at.Sub(last) < rule.HoldFor {
						fresh = last // its timestamp() does not heed the marker: what has left its page grows old instead
					}
					if !fresh.Equal(theirs.Fresh[h.uid]) {
						t.Errorf("%s before: the age of %s is %s embedded and %s remote", back, h.uid, at.Sub(fresh), at.Sub(theirs.Fresh[h.uid]))
					}
					x, embedded := a[h.uid]
					y, remote := z[h.uid]
					if b.binary == victoriaMetrics && !h.steady {
						continue
					}
					if embedded && (!remote || math.Abs(x-y) > b.tolerance) || b.binary == prometheus && embedded != remote {
						t.Errorf("%s before: %s is %v, %v embedded and %v, %v remote", back, h.uid, x, embedded, y, remote)
					}
					if remote && h.steady && math.Abs(y-100*h.share) > b.tolerance {
						t.Errorf("%s before: %s is %v remote, and is steady at %v", back, h.uid, y, 100*h.share)
					}
					if embedded {
						compared++
					}
				}
			}
			if least := map[binary]int{prometheus: 900, victoriaMetrics: 250}[b.binary]; compared < least {
				t.Errorf("%d values were compared: too few of %d to be a proof", compared, 5*workers)
			}
			t.Logf("%d values compared", compared)
		})
	}
}

// exactness is an engine and how far its values may be off.
type exactness struct {
	binary
	tolerance float64
}

// hides shows that VictoriaMetrics without the arguments that a Remote sends evaluates 30 s (-search.latencyOffset) earlier.
func hides(t *testing.T, target string) {
	t.Helper()
	rule, now := rules.Default()[0], time.Now()
	response, err := http.PostForm(target+"/api/v1/query", url.Values{"query": {"max(" + rule.FreshnessQuery() + ")"}, "time": {fmt.Sprint(now.Unix())}})
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var answer struct {
		Data struct{ Result []struct{ Value [2]any } }
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || len(answer.Data.Result) != 1 {
		t.Fatalf("%v, %v", answer, err)
	}
	seconds, err := strconv.ParseFloat(fmt.Sprint(answer.Data.Result[0].Value[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	if age := now.Sub(time.UnixMilli(int64(seconds * 1000))); age < 29*time.Second {
		t.Errorf("without them the newest sample is %s old: they are not needed any more", age)
	}
}

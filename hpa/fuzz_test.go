package hpa

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// draw takes values off a fuzzer's bytes; when they run out, all is 0.
type draw []byte

func (d *draw) uint64() (v uint64) {
	var raw [8]byte
	*d = (*d)[copy(raw[:], *d):]
	return binary.LittleEndian.Uint64(raw[:])
}

func (d *draw) float() float64 { return math.Float64frombits(d.uint64()) }

func (d *draw) byte() (b byte) {
	if len(*d) > 0 {
		b, *d = (*d)[0], (*d)[1:]
	}
	return b
}

func pick[T any](d *draw, from ...T) T { return from[int(d.byte())%len(from)] }

// value is any number there is, mostly through the conversion that adapters without a guard do.
func (d *draw) value() Milli {
	return pick(d, Milli(d.uint64()), Milli(int64(d.float()*1000)), 80_000, 95_000, 0, -1, math.MaxInt64, math.MinInt64)
}

func (d *draw) int32() int32 {
	return pick(d, int32(d.uint64()), 1, 2, 3, 10, 0, -1, math.MaxInt32, math.MinInt32)
}

func (d *draw) duration() time.Duration {
	return pick(d, time.Duration(d.uint64()), 0, 15*time.Second, time.Minute, time.Hour)
}

func (d *draw) rules() (r Rules) {
	r.SelectPolicy = pick(d, "", MaxChange, MinChange, MinChange, Disabled, "nonsense")
	for range d.byte() % 4 {
		r.Policies = append(r.Policies, Policy{pick(d, PodsPolicy, PodsPolicy, PercentPolicy, PercentPolicy, "nonsense"), d.int32(), d.duration()})
	}
	if w := d.duration(); d.byte()%2 == 0 {
		r.StabilizationWindow = &w
	}
	if t := pick(d, d.float(), math.NaN(), math.Inf(1), 0.1, 0); d.byte()%2 == 0 {
		r.Tolerance = &t
	}
	return r
}

func (d *draw) spec() (s Spec) {
	s.MinReplicas = int32(d.byte() % 5)
	s.MaxReplicas = max(1, s.MinReplicas, d.int32())
	for range pick(d, 1, 1, 1, 2, 3) {
		s.Metrics = append(s.Metrics, Metric{pick(d, "gpu_utilization", "cpu"), pick(d, External, Object, Pods, Resource, ContainerResource, "nonsense"),
			Target{pick(d, AverageValue, AverageValue, AverageValue, Value, Value, Utilization, "nonsense"), d.value(), d.int32()}})
	}
	if d.byte()%2 == 0 {
		s.Behavior = &Behavior{d.rules(), d.rules()}
	}
	return s
}

func (d *draw) state(metrics int, now time.Time) (st State) {
	st.SpecReplicas, st.StatusReplicas = d.int32(), d.int32()
	for i := range int(d.byte() % 6) {
		st.Pods = append(st.Pods, Pod{fmt.Sprint("web-", i), pick(d, "Running", "Pending", "Failed", ""), d.byte()%4 == 0, pick(d, "True", "False", ""), now.Add(-d.duration()), now.Add(-d.duration())})
	}
	for range pick(d, metrics, metrics, metrics, metrics, metrics, 0) {
		r := Reading{Samples: map[string]Sample{}, Requests: map[string]Milli{}}
		for i := range int(d.byte() % 6) {
			r.Items = append(r.Items, d.value())
			r.Samples[fmt.Sprint("web-", i)] = Sample{d.value(), now.Add(-d.duration()), d.duration()}
			r.Requests[fmt.Sprint("web-", i)] = d.value()
		}
		st.Readings = append(st.Readings, r)
	}
	return st
}

func (d *draw) history(now time.Time) (h History) {
	h.ScaledToZero = d.byte()%2 == 0
	for range d.byte() % 5 {
		h.Recommendations = append(h.Recommendations, Recommendation{d.int32(), now.Add(-d.duration())})
		h.Ups = append(h.Ups, ScaleEvent{d.int32(), now.Add(-d.duration()), d.byte()%2 == 0})
		h.Downs = append(h.Downs, ScaleEvent{d.int32(), now.Add(-d.duration()), d.byte()%2 == 0})
	}
	return h
}

// Whatever the metrics, the pods, the history and the targets are, the size is within minReplicas and maxReplicas, or 0 as it was,
// where the HPA is switched off or cannot read its metrics; and what is returned fits together.
func FuzzDecide(f *testing.F) {
	f.Add([]byte{})
	for seed := range uint64(300) {
		data := make([]byte, 3000)
		for i, r := 0, rand.New(rand.NewPCG(seed, 0)); i < len(data); i++ {
			data[i] = byte(r.Uint32())
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		d := draw(data)
		now := noon
		spec := d.spec()
		history := d.history(now)
		for range 4 {
			state := d.state(len(spec.Metrics), now)
			before := fmt.Sprintf("%+v", history)
			got, next := Decide(Defaults, spec, state, history, now)
			if after := fmt.Sprintf("%+v", history); after != before {
				t.Fatalf("the history changed:\n%s\n%s", before, after)
			}
			switch {
			case state.SpecReplicas == 0 && (got.Ground == OnZero || got.Ground == OnError) && got.Replicas == 0:
			case got.Replicas < spec.MinReplicas || got.Replicas > spec.MaxReplicas:
				t.Fatalf("%d is not within %d and %d: %+v", got.Replicas, spec.MinReplicas, spec.MaxReplicas, got)
			}
			if got.Ground == OnError && (got.Err == nil || got.Replicas != state.SpecReplicas) || got.Ground != OnError && got.Err != nil {
				t.Fatalf("an error keeps the size, and nothing else does: %+v of %d", got, state.SpecReplicas)
			}
			if got.Ground == OnMetrics && (got.Deciding < 0 || got.Metrics[got.Deciding].Err != nil) {
				t.Fatalf("the deciding metric is %d of %+v", got.Deciding, got.Metrics)
			}
			if s := got.Stabilization; (s.Reason != "") != (s.Recommended != s.Replicas) {
				t.Fatalf("stabilized without a reason, or for no reason: %+v", s)
			}
			if got.ScalingLimited.True != (got.Limit.Replicas != got.Stabilization.Replicas) {
				t.Fatalf("limited: %+v %+v", got.ScalingLimited, got.Limit)
			}
			history, now = next, now.Add(d.duration()/2)
		}
	})
}

package exporter

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
	"github.com/capstan-gpu/capstan/trainer/stats"
)

// crowded is a node of 8 GPUs that 100 pods share.
func crowded() (gpu.Reading, []podmap.Allocation) {
	var r gpu.Reading
	for i := range 8 {
		d := node().GPUs.Devices[0]
		d.UUID, d.Index = uuid(i), i
		r.Devices = append(r.Devices, d)
	}
	var all []podmap.Allocation
	for i := range 100 {
		all = append(all, podmap.Allocation{DeviceID: fmt.Sprint(uuid(i%8), "::", i/8), UUID: uuid(i % 8), Namespace: "train", Pod: fmt.Sprint("worker-", i),
			PodUID: fmt.Sprintf("6f1c0000-0000-4000-8000-%012d", i), Container: "worker", Resource: "nvidia.com/gpu", Shared: true})
	}
	return r, all
}

func BenchmarkCycle(b *testing.B) {
	r, all := crowded()
	board := newBoard()
	board.mapped(podmap.Mapping{At: noon, Allocations: all})
	b.ReportAllocs()
	for b.Loop() {
		board.begin(stageGPU, noon)
		board.read(noon, r)
	}
}

func BenchmarkPage(b *testing.B) {
	r, all := crowded()
	board := newBoard()
	board.mapped(podmap.Mapping{At: noon, Allocations: all})
	board.read(noon, r)
	g := gatherer{&nodeRenderer{snapshot: board.snapshot, now: time.Now, training: trainingFamilies(stats.Families())}}
	h := promhttp.HandlerFor(g, promhttp.HandlerOpts{EnableOpenMetrics: true})
	for _, encoding := range []string{"identity", "gzip"} {
		b.Run(encoding, func(b *testing.B) {
			request := httptest.NewRequest(http.MethodGet, "/metrics", nil)
			request.Header.Set("Accept-Encoding", encoding)
			b.ReportAllocs()
			for b.Loop() {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, request)
				b.ReportMetric(float64(w.Body.Len()), "bytes/page")
			}
		})
	}
	b.Run("gather", func(b *testing.B) {
		for b.Loop() {
			g.Gather()
		}
	})
}

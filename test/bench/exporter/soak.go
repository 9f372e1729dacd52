package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/capstan-gpu/capstan/exporter"
	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/test/bench/report"
)

// cycleCount is the gauge by which the accelerated run says how far it is.
const cycleCount = "bench_cycles"

// beSoak is the accelerated run: the exporter's own packages, a reading every millisecond and a question to the kubelet every
// five, until it is told to end.
func beSoak(ctx context.Context, kubeletDir string) error {
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	reader := &counting{Reader: gpu.New(gpu.Config{Logger: logger})}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collectors.NewGoCollector(),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: cycleCount}, func() float64 { return float64(reader.n.Load()) }))
	return exporter.Run(ctx, exporter.Config{Listen: "127.0.0.1:0", Interval: time.Millisecond, KubeletDir: kubeletDir,
		MappingInterval: 5 * time.Millisecond, MappingMaxAge: 30 * time.Second, StatsInterval: time.Second, StuckAfter: time.Minute,
		GPU: reader, Registry: registry, Logger: logger,
		OnListen: func(a net.Addr) { fmt.Fprintf(os.Stderr, "msg=listening address=%s\n", a) }})
}

// counting counts readings.
type counting struct {
	exporter.Reader
	n atomic.Int64
}

func (c *counting) Read(now time.Time) gpu.Reading {
	defer c.n.Add(1)
	return c.Reader.Read(now)
}

// accelerated lets a process of its own do the cycles, while pods come and go and scrapes go on, and looks at its memory.
func accelerated(ctx context.Context, d *driver, k *kubelet, cycles int) ([]report.Figure, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p, err := launch(ctx, d, self, "-soak", k.dir)
	if err != nil {
		return nil, err
	}
	defer p.end()
	if err := p.until(ctx, metricname.PodGPUBusySeconds, allPods*9/10); err != nil {
		return nil, err
	}
	fmt.Printf("accelerated: %d readings in a tight loop, a pod replaced every 20 ms\n", cycles)
	began := time.Now()
	born := k.born
	type point struct {
		cycles int
		rss    float64
	}
	compressed, err := p.scraper()
	if err != nil {
		return nil, err
	}
	defer compressed.conn.Close()
	var points []point
	told := 0
	for n := 0; n < cycles; {
		for i := range 25 {
			k.replace((len(points)*25 + i) % allPods)
			time.Sleep(20 * time.Millisecond)
		}
		page, err := p.page()
		if err != nil {
			return nil, err
		}
		if _, err := compressed.scrape(); err != nil {
			return nil, err
		}
		if n, err = value(page, cycleCount); err != nil {
			return nil, err
		}
		points = append(points, point{n, p.rss()})
		if n/(cycles/10) > told {
			told = n / (cycles / 10)
			fmt.Printf("  %d readings, %.1f MiB, %s\n", n, p.rss(), time.Since(began).Round(time.Second))
		}
		if time.Since(began) > 30*time.Minute || ctx.Err() != nil {
			return nil, fmt.Errorf("only %d of %d readings in %s", n, cycles, time.Since(began))
		}
	}
	// Memory breathes with the garbage collector: compare medians of a fifth of the run each.
	median := func(from, to float64) float64 {
		var some []float64
		for _, p := range points {
			if share := float64(p.cycles) / float64(cycles); share >= from && share <= to {
				some = append(some, p.rss)
			}
		}
		if len(some) == 0 {
			return points[len(points)-1].rss
		}
		slices.Sort(some)
		return some[len(some)/2]
	}
	most := 0.0
	for _, p := range points {
		most = max(most, p.rss)
	}
	how := fmt.Sprintf("%d readings in %s instead of a second each, %d pods came and went meanwhile", points[len(points)-1].cycles, time.Since(began).Round(time.Second), k.born-born)
	return []report.Figure{
		report.AtMost("exporter_rss_mib", most, "MiB", 40, "the most seen; "+how),
		report.AtMost("exporter_rss_growth_mib", median(0.8, 2)-median(0.5, 0.7), "MiB", 1, "over the second half of the same run: median of the last fifth of the run less that of the third"),
	}, nil
}

func value(page, name string) (int, error) {
	_, rest, found := strings.Cut(page, "\n"+name+" ")
	if !found {
		return 0, fmt.Errorf("no %s on the page", name)
	}
	line, _, _ := strings.Cut(rest, "\n")
	v, err := strconv.ParseFloat(line, 64)
	return int(v), err
}

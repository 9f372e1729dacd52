package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/guptarohit/asciigraph"

	"github.com/capstan-gpu/capstan/test/rig"
)

// summarize prints what happened as a plot and in words, with what the parts cost.
func summarize(ctx context.Context, w io.Writer, c *rig.Cluster, s *Story, sights []Sight, settings string) error {
	if len(sights) == 0 {
		return nil
	}
	last := sights[len(sights)-1]
	var workers, load []float64
	for _, n := range sights {
		workers = append(workers, float64(n.Workers))
		load = append(load, n.Rate/100)
	}
	const width = 72
	fmt.Fprintf(w, "\n%s\n", asciigraph.PlotMany([][]float64{load, workers}, asciigraph.Height(max(s.Peak, 3)), asciigraph.Width(width), asciigraph.LowerBound(0), asciigraph.Precision(0),
		asciigraph.SeriesColors(asciigraph.Default, asciigraph.Default), asciigraph.SeriesChars(asciigraph.CreateCharSet("·"), asciigraph.DefaultCharSet)))
	fmt.Fprintf(w, "     0s%s%s\n     ─ workers ready    · load, in workers' worth of samples\n\n", strings.Repeat(" ", width-12), last.At.Round(time.Second))

	verdict := "The HPA went up and came back."
	if s.Act == Failed {
		verdict = "FAILED: " + s.Why
	}
	fmt.Fprintf(w, "%s\n", verdict)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "  %-20s %s\n", name, fmt.Sprintf(format, args...))
	}
	row("workers", "%d → %d → %d", s.Plan.Min, s.Peak, last.Workers)
	if rush, ok := s.Marks[Rush]; ok && len(s.Ups) > 0 {
		row("first step up", "%s after the load rose", (s.Ups[0] - rush).Round(time.Second))
	}
	if after, ok := s.Marks[After]; ok && s.Act == Done {
		row("back to the minimum", "%s after the load fell", (s.Marks[Done] - s.Plan.Settle - after).Round(time.Second))
	}
	row("samples", "%d completed, each counted once; %d lost", last.Done, last.Lost)
	row("HPA", "%s", settings)
	if rules, err := c.Windows(ctx); err == nil {
		row("rule", "%s", rules)
	}
	memory, err := c.Memory(ctx)
	if err != nil {
		return err
	}
	for _, m := range memory {
		row("memory", "%s %.1f MiB on %s", m.Pod, m.RSS/(1<<20), m.Node)
	}
	return nil
}

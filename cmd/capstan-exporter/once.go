package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/capstan-gpu/capstan/exporter"
	"github.com/capstan-gpu/capstan/exporter/gpu"
)

// once is one reading, for people and scripts.
type once struct {
	At            time.Time `json:"at"`
	DriverVersion string    `json:"driverVersion,omitempty"`
	GPUs          []oneGPU  `json:"gpus"`
	Missing       []string  `json:"missing,omitempty"`
}

// oneGPU is one line; what is not known is left out.
type oneGPU struct {
	Index              int      `json:"index"`
	UUID               string   `json:"uuid"`
	Model              string   `json:"model"`
	Up                 bool     `json:"up"`
	Reason             string   `json:"reason,omitempty"`
	Utilization        *float64 `json:"utilizationRatio,omitempty"`
	MemoryUsed         *uint64  `json:"memoryUsedBytes,omitempty"`
	MemoryTotal        *uint64  `json:"memoryTotalBytes,omitempty"`
	PowerWatts         *float64 `json:"powerWatts,omitempty"`
	TemperatureCelsius *float64 `json:"temperatureCelsius,omitempty"`
	Pods               []string `json:"pods,omitempty"` // namespace/name
}

// show prints one reading. No GPU to read is an error, for scripts.
func show(ctx context.Context, w io.Writer, cfg exporter.Config, output string) error {
	s, err := exporter.Once(ctx, cfg)
	if err != nil {
		return err
	}
	o := onceOf(s)
	if output == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		err = e.Encode(o)
	} else {
		err = o.table(w)
	}
	if err != nil {
		return err
	}
	if s.GPUs.Err != nil {
		return fmt.Errorf("read GPUs: %w", s.GPUs.Err)
	}
	return nil
}

func onceOf(s *exporter.Snapshot) once {
	o := once{At: s.GPUs.At, DriverVersion: s.GPUs.DriverVersion, GPUs: []oneGPU{}, Missing: s.Missing(time.Now())}
	for _, d := range s.GPUs.Devices {
		o.GPUs = append(o.GPUs, oneGPU{Index: d.Index, UUID: d.UUID, Model: d.Model, Up: d.Up, Reason: d.Reason, Utilization: d.Utilization,
			MemoryUsed: d.MemoryUsed, MemoryTotal: d.MemoryTotal, PowerWatts: d.PowerWatts, TemperatureCelsius: d.TemperatureCelsius, Pods: podsOn(s, d)})
	}
	return o
}

func podsOn(s *exporter.Snapshot, d gpu.Device) (pods []string) {
	for _, a := range s.Held {
		if name := a.Namespace + "/" + a.Pod; a.UUID == d.UUID && !slices.Contains(pods, name) {
			pods = append(pods, name)
		}
	}
	return pods
}

func (o once) table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "GPU\tMODEL\tUUID\tBUSY\tMEMORY\tPOWER\tTEMP\tPODS")
	for _, g := range o.GPUs {
		busy, memory := "-", "-"
		if g.Utilization != nil {
			busy = fmt.Sprintf("%.0f %%", 100**g.Utilization)
		}
		if !g.Up {
			busy = g.Reason
		}
		if g.MemoryUsed != nil && g.MemoryTotal != nil {
			memory = fmt.Sprintf("%.1f/%.0f GiB", float64(*g.MemoryUsed)/(1<<30), float64(*g.MemoryTotal)/(1<<30))
		}
		pods := strings.Join(g.Pods, ",")
		if pods == "" {
			pods = "-"
		}
		fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", g.Index, g.Model, g.UUID, busy, memory, unit(g.PowerWatts, "W"), unit(g.TemperatureCelsius, "°C"), pods)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, m := range o.Missing {
		fmt.Fprintln(w, "missing:", m)
	}
	return nil
}

func unit(v *float64, unit string) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f %s", *v, unit)
}

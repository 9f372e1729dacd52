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

	Instances []oneInstance `json:"instances,omitempty"` // MIG
}

// oneInstance is one line below its GPU's.
type oneInstance struct {
	UUID        string   `json:"uuid"`
	Profile     string   `json:"profile"`
	Utilization *float64 `json:"utilizationRatio,omitempty"`
	MemoryUsed  *uint64  `json:"memoryUsedBytes,omitempty"`
	MemoryTotal *uint64  `json:"memoryTotalBytes,omitempty"`
	Pods        []string `json:"pods,omitempty"`
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
		g := oneGPU{Index: d.Index, UUID: d.UUID, Model: d.Model, Up: d.Up, Reason: d.Reason, Utilization: d.Utilization,
			MemoryUsed: d.MemoryUsed, MemoryTotal: d.MemoryTotal, PowerWatts: d.PowerWatts, TemperatureCelsius: d.TemperatureCelsius, Pods: podsOn(s, d.UUID)}
		for _, in := range d.Instances {
			g.Instances = append(g.Instances, oneInstance{UUID: in.UUID, Profile: in.Profile, Utilization: in.Utilization, MemoryUsed: in.MemoryUsed,
				MemoryTotal: in.MemoryTotal, Pods: podsOn(s, in.UUID)})
		}
		o.GPUs = append(o.GPUs, g)
	}
	return o
}

func podsOn(s *exporter.Snapshot, uuid string) (pods []string) {
	for _, a := range s.Held {
		if name := a.Namespace + "/" + a.Pod; a.UUID == uuid && !slices.Contains(pods, name) {
			pods = append(pods, name)
		}
	}
	return pods
}

func (o once) table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "GPU\tMODEL\tUUID\tBUSY\tMEMORY\tPOWER\tTEMP\tPODS")
	for _, g := range o.GPUs {
		busy := share(g.Utilization)
		if !g.Up {
			busy = g.Reason
		}
		fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", g.Index, g.Model, g.UUID, busy, memory(g.MemoryUsed, g.MemoryTotal),
			unit(g.PowerWatts, "W"), unit(g.TemperatureCelsius, "°C"), list(g.Pods))
		for _, in := range g.Instances {
			fmt.Fprintf(t, "\t  MIG %s\t%s\t%s\t%s\t-\t-\t%s\n", in.Profile, in.UUID, share(in.Utilization), memory(in.MemoryUsed, in.MemoryTotal), list(in.Pods))
		}
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

func share(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f %%", 100**v)
}

func memory(used, total *uint64) string {
	if used == nil || total == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f/%.0f GiB", float64(*used)/(1<<30), float64(*total)/(1<<30))
}

func list(names []string) string {
	if len(names) == 0 {
		return "-"
	}
	return strings.Join(names, ",")
}

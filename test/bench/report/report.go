// Package report writes the figures of a benchmark against their budgets: a JSON list for machines and a table for people.
// It judges nothing and measures nothing: whether a budget holds is said by who measured.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"text/tabwriter"
)

// Figure is one number against its budget.
type Figure struct {
	Name   string  `json:"name"` // as in the budget table, unit included: exporter_rss_mib
	Value  float64 `json:"value"`
	Unit   string  `json:"unit"`
	Budget float64 `json:"budget"`
	Holds  bool    `json:"holds"`
	Note   string  `json:"note,omitempty"` // how it was measured, where that is not plain
}

// AtMost is a figure whose budget is an upper bound.
func AtMost(name string, value float64, unit string, budget float64, note string) Figure {
	return Figure{name, value, unit, budget, value <= budget, note}
}

// AtLeast is a figure whose budget is a lower bound.
func AtLeast(name string, value float64, unit string, budget float64, note string) Figure {
	return Figure{name, value, unit, budget, value >= budget, note}
}

// Write writes the figures to path, whose folder it makes, and prints them to standard output as a table.
func Write(path string, figures []Figure) error {
	for _, f := range figures {
		if math.IsNaN(f.Value) || math.IsInf(f.Value, 0) {
			return fmt.Errorf("write %s: %s is %g, which is no measurement", path, f.Name, f.Value)
		}
	}
	b, err := json.MarshalIndent(figures, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
		return err
	}
	return Print(os.Stdout, path, figures)
}

// Print prints the figures as a table under a title.
func Print(w io.Writer, title string, figures []Figure) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "%s\tvalue\tbudget\tunit\tholds\t\n", title)
	held := 0
	for _, f := range figures {
		holds := "NO"
		if f.Holds {
			holds, held = "yes", held+1
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", f.Name, short(f.Value), short(f.Budget), f.Unit, holds, f.Note)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "%d of %d budgets hold\n", held, len(figures))
	return err
}

// short keeps three significant digits of what is below 1000.
func short(v float64) string {
	if math.Abs(v) >= 1000 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

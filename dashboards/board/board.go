// Package board makes Capstan's Grafana dashboards, as data first and then by Grafana's own builders. It knows no Grafana server and
// no Prometheus: what it makes is checked by package check.
package board

import (
	"encoding/json"
	"fmt"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
	"github.com/grafana/grafana-foundation-sdk/go/common"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

// Panel is one panel as data.
type Panel struct {
	Title, Description string
	Unit               string // of Grafana's list: percent, s, bytes, ops, short …
	Min, Max           *float64
	Stat               bool     // one number, else a time series
	Width              uint32   // of 24
	Warn, Bad          *float64 // thresholds; below Bad when Low
	Low                bool     // low is bad
	Steps              bool     // drawn as steps: a count that jumps
	Queries            []Query
}

// Query is one line of a panel.
type Query struct{ Expr, Legend string }

// Row is a heading and its panels.
type Row struct {
	Title  string
	Panels []Panel
}

// Board is a dashboard as data.
type Board struct {
	UID, Title, Description string
	Variables               []Variable
	Rows                    []Row
}

// Variable is a choice at the dashboard's head, filled by a query.
type Variable struct{ Name, Label, Query string }

func at(v float64) *float64 { return &v }

// all is every dashboard, by the name of its file.
var all = map[string]Board{"training-job": trainingJob}

// Names of the dashboards' files, without ".json".
func Names() []string { return []string{"training-job"} }

// Build makes a dashboard.
func Build(name string) (dashboard.Dashboard, error) {
	b, ok := all[name]
	if !ok {
		return dashboard.Dashboard{}, fmt.Errorf("dashboard %q: there are %v", name, Names())
	}
	return b.build()
}

// JSON is a dashboard as Grafana imports it.
func JSON(name string) ([]byte, error) {
	d, err := Build(name)
	if err != nil {
		return nil, err
	}
	raw, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(raw, '\n'), nil
}

const (
	datasource = "${datasource}"
	height     = 8
	statHeight = 4
)

func ref() common.DataSourceRef {
	kind, uid := "prometheus", datasource
	return common.DataSourceRef{Type: &kind, Uid: &uid}
}

func (b Board) build() (dashboard.Dashboard, error) {
	d := dashboard.NewDashboardBuilder(b.Title).Uid(b.UID).Description(b.Description).Tags([]string{"capstan"}).
		Refresh("30s").Time("now-1h", "now").Timezone("browser").Tooltip(dashboard.DashboardCursorSyncCrosshair).
		WithVariable(dashboard.NewDatasourceVariableBuilder("datasource").Label("Data source").Type("prometheus"))
	for _, v := range b.Variables {
		query := v.Query
		d = d.WithVariable(dashboard.NewQueryVariableBuilder(v.Name).Label(v.Label).Datasource(ref()).
			Query(dashboard.StringOrMap{String: &query}).Refresh(dashboard.VariableRefreshOnTimeRangeChanged).Sort(dashboard.VariableSortAlphabeticalAsc))
	}
	for _, r := range b.Rows {
		d = d.WithRow(dashboard.NewRowBuilder(r.Title))
		for _, p := range r.Panels {
			d = d.WithPanel(p.builder())
		}
	}
	return d.Build()
}

func (p Panel) builder() cog.Builder[dashboard.Panel] {
	if p.Stat {
		s := stat.NewPanelBuilder().Title(p.Title).Description(p.Description).Unit(p.Unit).Datasource(ref()).Span(p.Width).Height(statHeight).
			NoValue("no data").GraphMode(common.BigValueGraphModeArea).ReduceOptions(common.NewReduceDataOptionsBuilder().Calcs([]string{"lastNotNull"})).
			Thresholds(p.thresholds())
		if p.Min != nil {
			s = s.Min(*p.Min)
		}
		if p.Max != nil {
			s = s.Max(*p.Max)
		}
		for _, q := range p.Queries {
			s = s.WithTarget(q.builder())
		}
		return s
	}
	// Gaps stay gaps: what is not known is not zero, and not a line either.
	gaps := false
	t := timeseries.NewPanelBuilder().Title(p.Title).Description(p.Description).Unit(p.Unit).Datasource(ref()).Span(p.Width).Height(height).
		NoValue("no data").SpanNulls(common.BoolOrFloat64{Bool: &gaps}).FillOpacity(8).Thresholds(p.thresholds()).
		Legend(common.NewVizLegendOptionsBuilder().DisplayMode(common.LegendDisplayModeTable).Placement(common.LegendPlacementBottom).ShowLegend(true).Calcs([]string{"mean", "lastNotNull", "max"}))
	if p.Warn != nil || p.Bad != nil {
		t = t.ThresholdsStyle(common.NewGraphThresholdsStyleConfigBuilder().Mode(common.GraphThresholdsStyleModeDashed))
	}
	if p.Steps {
		t = t.LineInterpolation(common.LineInterpolationStepAfter)
	}
	if p.Min != nil {
		t = t.Min(*p.Min)
	}
	if p.Max != nil {
		t = t.Max(*p.Max)
	}
	for _, q := range p.Queries {
		t = t.WithTarget(q.builder())
	}
	return t
}

func (q Query) builder() cog.Builder[variants.Dataquery] {
	return prometheus.NewDataqueryBuilder().Expr(q.Expr).LegendFormat(q.Legend).Datasource(ref())
}

// thresholds colours a value: green, then orange, then red; the other way round where low is bad.
func (p Panel) thresholds() cog.Builder[dashboard.ThresholdsConfig] {
	steps := []dashboard.Threshold{{Color: "green"}}
	if p.Low {
		steps = []dashboard.Threshold{{Color: "red"}}
	}
	if p.Warn != nil {
		steps = append(steps, dashboard.Threshold{Value: p.Warn, Color: "orange"})
	}
	if p.Bad != nil {
		color := "red"
		if p.Low {
			color = "green"
		}
		steps = append(steps, dashboard.Threshold{Value: p.Bad, Color: color})
	}
	return dashboard.NewThresholdsConfigBuilder().Mode(dashboard.ThresholdsModeAbsolute).Steps(steps)
}

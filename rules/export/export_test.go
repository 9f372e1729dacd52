package export

import (
	"flag"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"
	"pgregory.net/rapid"

	"github.com/capstan-gpu/capstan/rules"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// groups is what Prometheus itself reads.
func groups(t interface{ Fatalf(string, ...any) }, data []byte) []rulefmt.RuleGroup {
	read, errs := rulefmt.Parse(data, false, model.LegacyValidation, parser.NewParser(parser.Options{}), slog.New(slog.DiscardHandler))
	if len(errs) > 0 || read == nil {
		t.Fatalf("%v in\n%s", errs, data)
	}
	return read.Groups
}

// object is a PrometheusRule, as far as it is written.
type object struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct {
		Name   string
		Labels map[string]string
	}
	Spec struct{ Groups yaml.Node }
}

// Golden files of the shipped rules and of a file of everything unusual. `go test ./rules/export -update` rewrites them; read the diff.
func TestGolden(t *testing.T) {
	odd, err := os.ReadFile("testdata/odd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	list, err := rules.Parse("odd.yaml", odd)
	if err != nil {
		t.Fatal(err)
	}
	for name, list := range map[string][]rules.Rule{"default": rules.Default(), "odd": list} {
		for _, format := range []string{Prometheus, PrometheusRule} {
			got, err := Rules(list, format, 15*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+"."+format+".golden")
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != string(want) {
				t.Errorf("%s is now (go test ./rules/export -update rewrites it)\n%s", golden, got)
			}
		}
	}
}

// Prometheus takes the file, the operator's object holds the same groups, and every rule is there with its window.
func TestPrometheusReadsIt(t *testing.T) {
	list := rules.Default()
	file, err := Rules(list, Prometheus, 15*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	group := groups(t, file)
	if len(group) != 1 || group[0].Name != Name || time.Duration(group[0].Interval) != 15*time.Second || len(group[0].Rules) != len(list) {
		t.Fatalf("%+v", group)
	}
	for i, r := range group[0].Rules {
		if r.Expr != list[i].Query() || !regexp.MustCompile(`^namespace_pod:`+list[i].Metric+`:\w+1m$`).MatchString(r.Record) {
			t.Errorf("%+v", r)
		}
	}
	written, err := Rules(list, PrometheusRule, 15*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var o object
	decoder := yaml.NewDecoder(strings.NewReader(string(written)))
	decoder.KnownFields(true)
	if err := decoder.Decode(&o); err != nil {
		t.Fatal(err)
	}
	if o.APIVersion != "monitoring.coreos.com/v1" || o.Kind != "PrometheusRule" || o.Metadata.Name != Name {
		t.Errorf("%+v", o)
	}
	inside, err := yaml.Marshal(map[string]*yaml.Node{"groups": &o.Spec.Groups})
	if err != nil {
		t.Fatal(err)
	}
	if got := groups(t, inside); len(got) != 1 || len(got[0].Rules) != len(list) || got[0].Rules[0].Expr != group[0].Rules[0].Expr {
		t.Errorf("%+v", got)
	}
}

func TestRulesRefuses(t *testing.T) {
	r := rules.Default()[0]
	r.Metric = "gpu.utilization"
	if _, err := Rules(append(rules.Default(), r), Prometheus, time.Minute); err == nil || !strings.Contains(err.Error(), "metrics gpu_utilization and gpu.utilization would both be recorded as") {
		t.Error(err)
	}
	if _, err := Rules(rules.Default(), "json", time.Minute); err == nil || err.Error() != `there is no format "json": use prometheus or prometheusrule` {
		t.Error(err)
	}
	if _, err := Rules([]rules.Rule{{Metric: "m", Expr: "sum("}}, Prometheus, time.Minute); err == nil || !strings.HasPrefix(err.Error(), "metric m: ") {
		t.Error(err)
	}
}

// Whatever a rule file may say, Prometheus reads what is written of it, with the very expression.
func TestPrometheusReadsWhatParseTakes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		metric := rapid.StringMatching(`[a-z0-9]([a-z0-9_.-]{0,8}[a-z0-9])?`).Draw(t, "metric")
		node := func(value any) string {
			out, err := yaml.Marshal(value)
			if err != nil {
				t.Fatalf("%v", err)
			}
			return strings.TrimSuffix(string(out), "\n")
		}
		help := rapid.StringMatching(`x[A-Za-z#:'"\\{}\n é-]{0,30}`).Draw(t, "help")
		label := rapid.StringMatching(`[A-Za-z #:{}"'\\\n\té%-]{0,20}`).Draw(t, "label")
		expr := rapid.SampledFrom([]string{"a", "rate(a[$window])", "max_over_time(rate(a[10s])[20s:5s])", "a # comment", "a\n  + a"}).Draw(t, "expr")
		expr = "sum by (pod_uid) (a{x=" + strconv.Quote(label) + "}) + " + expr
		file := "apiVersion: capstan.dev/v1alpha1\nkind: Rules\nrules:\n" + node([]map[string]any{{
			"metric": metric, "help": help, "expr": expr, "freshness": "a", "window": "90s",
			"unit": rapid.SampledFrom([]string{"percent", "ratio", "bytes", "count"}).Draw(t, "unit"),
		}})
		list, err := rules.Parse("x.yaml", []byte(file))
		if err != nil {
			t.Fatalf("%v in\n%s", err, file)
		}
		written, err := Rules(list, Prometheus, time.Minute)
		if err != nil {
			t.Fatalf("%v", err)
		}
		group := groups(t, written)
		if len(group) != 1 || len(group[0].Rules) != 1 || group[0].Rules[0].Expr != list[0].Query() {
			t.Fatalf("%s", written)
		}
	})
}

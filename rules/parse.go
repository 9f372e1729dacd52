package rules

import (
	_ "embed"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/capstan-gpu/capstan/rules/document"
)

// What a rule has where its file says nothing.
const (
	defaultWindow  = 60 * time.Second
	defaultMaxAge  = 15 * time.Second // three scrapes of 5 s
	defaultJoinFor = 120 * time.Second
	leastHoldFor   = 60 * time.Second // holdFor is at least that,
	scrapesToHold  = 15 * time.Second // and the window and three scrapes
)

// What a rule may have.
const (
	leastWindow, mostWindow = time.Second, time.Hour
	leastMaxAge, mostMaxAge = time.Second, 10 * time.Minute
	mostHoldFor             = 2 * time.Hour // the longest window and three scrapes fit in
	mostJoinFor             = time.Hour
)

// apiVersion and kind of a rule file.
const (
	apiVersion = "capstan.dev/v1alpha1"
	kind       = "Rules"
)

//go:embed default.yaml
var defaultYAML []byte

// DefaultYAML is the file of the shipped rules, comments included, a fresh copy each time.
func DefaultYAML() []byte { return append([]byte(nil), defaultYAML...) }

// Default returns the shipped rules, a fresh copy each time.
func Default() []Rule {
	list, err := Parse("default.yaml", defaultYAML)
	if err != nil {
		panic(err) // a test parses it
	}
	return list
}

// promDuration writes d as PromQL wants it.
func promDuration(d time.Duration) string {
	if d%time.Second == 0 {
		return strconv.FormatInt(int64(d/time.Second), 10) + "s"
	}
	return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
}

// Parse reads a rule file. The error has a line for everything that is wrong with it, as [Check] says it.
func Parse(name string, data []byte) ([]Rule, error) {
	list, problems := Check(name, data, 0)
	return list, document.Refused(problems)
}

// Check reads a rule file and says everything that is wrong with it, and what is doubtful. Unknown fields are wrong. There are no rules
// if anything is wrong; warnings alone leave them. A rule must also suit an adapter that collects once an interval; 0 asks for no
// such thing.
func Check(name string, data []byte, interval time.Duration) ([]Rule, []document.Problem) {
	var list []Rule
	problems := document.Read(name, data, func(root document.Node) { list = file(root, interval) })
	if document.Refused(problems) != nil {
		return nil, problems
	}
	return list, problems
}

func file(root document.Node, interval time.Duration) (list []Rule) {
	fields, ok := root.Fields("apiVersion", "kind", "rules")
	if !ok {
		return nil
	}
	fields["apiVersion"].Is(apiVersion)
	fields["kind"].Is(kind)
	seen := map[string]document.Node{}
	for _, item := range fields["rules"].AtLeastOne("a list of at least one rule") {
		r, metric := rule(item, interval)
		if first, twice := seen[r.Metric]; twice {
			metric.Fail("%q is already the metric of line %d: give one of them another name", r.Metric, first.Line())
		} else if r.Metric != "" {
			seen[r.Metric] = metric
		}
		list = append(list, r)
	}
	return list
}

// metricName is what the HPA can ask for: its client puts the name into a path (no '/' and no '%', not . or ..) in lower case.
var metricName = regexp.MustCompile(`^[a-z0-9]([a-z0-9_.-]*[a-z0-9])?$`)

// notInNames are the characters that a metric's name cannot have.
var notInNames = regexp.MustCompile(`[^a-z0-9_.-]+`)

var units = []string{Percent, "ratio", "bytes", "seconds", "per second", "watts", "count"}

// rule reads one rule, and returns the node of its metric, too.
func rule(n document.Node, interval time.Duration) (r Rule, metric document.Node) {
	fields, ok := n.Fields("metric", "help", "unit", "expr", "window", "freshness", "maxAge", "missing", "holdFor", "joinFor", "per", "aggregate", "collect")
	metric = fields["metric"]
	if !ok {
		return r, metric
	}
	r.Metric = metric.Text("the name that the HPA asks for, such as gpu_utilization")
	if r.Metric != "" && !metricName.MatchString(r.Metric) {
		fix := "write lower-case letters, digits, '_', '-' and '.', a letter or digit at both ends"
		if better := strings.Trim(notInNames.ReplaceAllString(strings.ToLower(r.Metric), "_"), "_.-"); better != "" {
			fix = "write " + better
		}
		metric.Fail("%q is no name that the HPA can ask for, which asks in lower case and by a path: %s", r.Metric, fix)
	}
	r.Help = fields["help"].Text("a sentence that says what the metric is")
	r.Unit = fields["unit"].OneOf("count", units...)
	r.Window = fields["window"].Duration(defaultWindow, leastWindow, mostWindow)
	r.MaxAge = fields["maxAge"].Duration(defaultMaxAge, leastMaxAge, mostMaxAge)
	r.Missing = Missing(fields["missing"].OneOf(string(Hold), string(Hold), string(Fail)))
	r.HoldFor = fields["holdFor"].Duration(max(leastHoldFor, r.Window+scrapesToHold, r.MaxAge), 0, mostHoldFor)
	r.JoinFor = fields["joinFor"].Duration(defaultJoinFor, 0, mostJoinFor)
	r.Collect = Collect(fields["collect"].OneOf(string(Always), string(Always), string(Asked)))
	r.Per = Per(fields["per"].OneOf(string(PerPod), string(PerPod), string(PerWorkload)))
	if r.Per == PerWorkload {
		r.Aggregate = Aggregate(fields["aggregate"].OneOf(string(Max), string(Max), string(Sum)))
	} else if v := fields["aggregate"]; !v.Missing {
		v.Fail("a rule that is per pod serves every pod's own value: leave it out, or write per: workload")
	}
	times(fields, r, interval)
	expressions(fields, &r)
	return r, metric
}

// times checks the rule's times against each other and against the adapter's interval.
func times(fields map[string]document.Node, r Rule, interval time.Duration) {
	short := document.Short
	if r.HoldFor < r.MaxAge {
		fields["holdFor"].Fail("%s is less than maxAge %s: a value would be given up while it is still fresh: write at least %s", short(r.HoldFor), short(r.MaxAge), short(r.MaxAge))
	} else if whole := r.Window + scrapesToHold; r.Per == PerPod && r.HoldFor < whole {
		fields["holdFor"].Warn("%s is less than the window and three scrapes: when a worker comes or goes, the old values are given up before the new are complete, and the HPA gets errors: write %s",
			short(r.HoldFor), short(whole))
	}
	if least := 2 * interval; r.MaxAge < least {
		fields["maxAge"].Fail("%s is less than two intervals of %s, so that one lost scrape is an outage: write %s, or use a shorter interval", short(r.MaxAge), short(interval), short(3*interval))
	}
	if least := 3 * interval; r.Window < least {
		fields["window"].Fail("%s is less than three intervals of %s, which is not enough for a rate: write at least %s, or use a shorter interval", short(r.Window), short(interval), short(least))
	}
}

// valid says whether a value may be served at all, and clamps what rounding made of 100 %.
func (r Rule) valid(v float64) (float64, bool) {
	if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
		return 0, false
	}
	if r.Unit == Percent && v > 100 {
		// Busy can exceed observed by the rounding of two counters, never by more.
		return 100, v <= 100.5
	}
	return v, true
}

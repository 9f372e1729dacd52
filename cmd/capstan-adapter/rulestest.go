package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/spf13/cobra"

	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/document"
	"github.com/capstan-gpu/capstan/rules/ruletest"
)

func testCommand(stdout io.Writer) *cobra.Command {
	var output, run, ruleFile string
	c := &cobra.Command{
		Use:   "test FILE...",
		Short: "Run tests of rules: given these series and pods, the HPA gets these items or this error",
		Long: `Run tests of rules. A test says which series the exporters show and which pods the workload has, and what an HPA gets at
some moments: these items, or this error. It goes through the adapter's own decoder, store, PromQL engine and policy, without
a clock.

  apiVersion: capstan.dev/v1alpha1
  kind: RuleTests
  rules: rules.yaml                  # beside this file; without it, the built-in rules
  interval: 5s                       # between two scrapes
  tests:
    - name: a worker whose exporter stops is held, then missing
      metric: gpu_utilization
      states:                        # the workload's pods from a moment on
        - at: 0s
          pods: [web-0, {name: web-1, node: node-7, readySince: -10m}]
      series:                        # in promtool's notation, a value at each scrape; _ is none, stale is a series that is gone
        - series: capstan_pod_gpu_observed_seconds_total
          pods: [web-0, web-1]       # one series for each, with the labels that the exporter gives it
          values: 0+5x12
        - series: capstan_pod_gpu_busy_seconds_total
          pods: [web-0, web-1]
          values: 0+4x12
      expect:
        - {at: 60s, items: {web-0: 80, web-1: 80}}
        - {at: 2m, items: {web-0: 80 held, web-1: 80 held}}
        - {at: 3m, error: web-1 on node-7 has had no valid value}      # a part of the text

A pod is its name, or a mapping of name, uid, node, phase, ready, readySince, terminating and gpus. A state may also say how
the job has ended (ended: succeeded). What trainers say of their ring are series, too: capstan_training_ring_generation,
capstan_training_ring_generation_age_seconds, capstan_training_steps_total. A rule that is per workload has one item, by the
workload's name (workload: worker unless the test says otherwise).

It exits with 1 if a test fails.`,
		Example: `  capstan-adapter rules test rules_test.yaml
  capstan-adapter rules test --run 'held|missing' rules_test.yaml
  capstan-adapter rules test --rules rules.yaml rules/default_test.yaml      # do my rules keep what the built-in ones promise?`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return hinted{errors.New("a FILE is needed"), "capstan-adapter rules test rules_test.yaml"}
			}
			return nil
		},
		ValidArgsFunction: yamlFiles,
		RunE: func(c *cobra.Command, args []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			only, err := regexp.Compile(run)
			if err != nil {
				return hinted{fmt.Errorf("--run: %w", err), "it is a regular expression that the names of tests match"}
			}
			report := &testReport{Tests: []testResult{}, Problems: []document.Problem{}}
			for _, name := range args {
				if err := report.run(c.Context(), name, ruleFile, only); err != nil {
					return err
				}
			}
			if output == "json" {
				err = writeJSON(stdout, report)
			} else {
				report.write(stdout)
			}
			switch {
			case err != nil:
				return err
			case len(report.Problems) > 0:
				return found{hinted{fmt.Errorf("%s, %d passed, %d failed", plural(len(report.Problems), "error"), report.Passed, report.Failed), "each line says what to write"}}
			case report.Failed > 0:
				return found{hinted{fmt.Errorf("%d passed, %d failed", report.Passed, report.Failed), "in the lines below FAIL, - is what the test wants, + is what the HPA gets"}}
			case report.Passed == 0:
				return hinted{fmt.Errorf("no test's name matches %q", run), "leave --run out to run all"}
			}
			return nil
		},
	}
	outputFlag(c, &output)
	c.Flags().StringVar(&run, "run", "", "run only tests whose names match this regular expression")
	c.Flags().StringVar(&ruleFile, "rules", "", "test these rules instead of those that the FILEs name")
	return c
}

// testReport is what became of all tests.
type testReport struct {
	Passed   int                `json:"passed"`
	Failed   int                `json:"failed"`
	Tests    []testResult       `json:"tests"`
	Problems []document.Problem `json:"problems"` // of test files and of rule files, whose tests did not run
}

type testResult struct {
	File     string             `json:"file"`
	Line     int                `json:"line"`
	Name     string             `json:"name"`
	Passed   bool               `json:"passed"`
	Failures []ruletest.Failure `json:"failures,omitempty"`
}

// run runs the tests of a file whose names match.
func (r *testReport) run(ctx context.Context, name, ruleFile string, only *regexp.Regexp) error {
	data, err := os.ReadFile(name)
	if err != nil {
		return hinted{err, "name files that can be read"}
	}
	file, problems := ruletest.Parse(name, data)
	if len(problems) > 0 {
		r.Problems = append(r.Problems, problems...)
		return nil
	}
	if ruleFile == "" && file.Rules != "" {
		ruleFile = file.Rules
		if !filepath.IsAbs(ruleFile) {
			ruleFile = filepath.Join(filepath.Dir(name), ruleFile)
		}
	}
	list, problems, err := rulesOf(ruleFile, file.Interval)
	if err != nil {
		return err
	}
	if document.Refused(problems) != nil {
		r.Problems = append(r.Problems, problems...)
		return nil
	}
	for _, t := range file.Tests {
		if !only.MatchString(t.Name) {
			continue
		}
		failures, err := file.Run(ctx, t, list)
		if err != nil {
			return err
		}
		r.Tests = append(r.Tests, testResult{name, t.Line, t.Name, len(failures) == 0, failures})
		if len(failures) == 0 {
			r.Passed++
		} else {
			r.Failed++
		}
	}
	return nil
}

// rulesOf reads a rule file, or the built-in rules where there is none, for an adapter of an interval.
func rulesOf(file string, interval time.Duration) ([]rules.Rule, []document.Problem, error) {
	if file == "" {
		list, err := loadRules("", interval)
		return list, nil, err
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, nil, hinted{err, "rules: in a test file names a rule file beside it; without it the built-in rules are tested"}
	}
	list, problems := rules.Check(file, data, interval)
	return list, problems, nil
}

func (r *testReport) write(w io.Writer) {
	for _, p := range r.Problems {
		fmt.Fprintln(w, p)
	}
	for _, t := range r.Tests {
		if t.Passed {
			fmt.Fprintf(w, "PASS  %s\n", t.Name)
			continue
		}
		fmt.Fprintf(w, "FAIL  %s\n", t.Name)
		for _, f := range t.Failures {
			fmt.Fprintf(w, "  %s:%d:%d: at %s, %s:\n", t.File, f.Line, f.Column, f.At, f.Metric)
			for _, line := range f.Diff {
				fmt.Fprintf(w, "    %s\n", line)
			}
			for _, note := range f.Notes {
				fmt.Fprintf(w, "    (%s)\n", note)
			}
		}
	}
}

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/document"
)

// builtIn is the name under which the built-in rules' file is spoken of.
const builtIn = "default.yaml"

func rulesCommand(stdout io.Writer) *cobra.Command {
	c := &cobra.Command{
		Use:   "rules",
		Short: "Check, test and export rule files",
		Long: `Check, test and export rule files.

A rule is one external metric: PromQL over what the exporters say, and what becomes of a worker without a value. To write
your own, begin with the built-in ones:

  capstan-adapter rules default > rules.yaml         # then change it
  capstan-adapter rules check rules.yaml             # is it right?
  capstan-adapter rules test rules_test.yaml         # does it do what you mean?
  capstan-adapter serve --rules rules.yaml           # use it

None of these needs a cluster.`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return hinted{fmt.Errorf("%q is no command", args[0]), "capstan-adapter rules --help lists the commands"}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error { return c.Help() },
	}
	c.AddCommand(defaultCommand(stdout), checkCommand(stdout), testCommand(stdout), exportCommand(stdout))
	return c
}

func defaultCommand(stdout io.Writer) *cobra.Command {
	return &cobra.Command{
		Use:     "default",
		Short:   "Print the built-in rules, to begin a file of your own with",
		Example: "  capstan-adapter rules default > rules.yaml",
		Args:    noArgs("it prints the built-in rules and takes nothing"),
		RunE: func(c *cobra.Command, args []string) error {
			_, err := stdout.Write(rules.DefaultYAML())
			return err
		},
	}
}

func checkCommand(stdout io.Writer) *cobra.Command {
	var output string
	var interval time.Duration
	c := &cobra.Command{
		Use:   "check [FILE...]",
		Short: "Say everything that is wrong with rule files, and which metrics they give",
		Long: `Say everything that is wrong with rule files, and which metrics they give. Without a FILE it checks the built-in rules.

Each line is FILE:LINE:COLUMN: FIELD: VALUE: FIX, which editors and CI can follow. An error keeps the adapter from using the
file; a warning names what is likely to go wrong, such as a join, which one duplicate series breaks for everybody.

It exits with 1 if there is an error, with 0 if there are only warnings.`,
		Example: `  capstan-adapter rules check rules.yaml
  capstan-adapter rules check --interval 15s rules.yaml      # for an adapter that collects every 15 seconds
  capstan-adapter rules check -o json rules/*.yaml`,
		ValidArgsFunction: yamlFiles,
		RunE: func(c *cobra.Command, args []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			files, err := checkFiles(args, interval)
			if err != nil {
				return err
			}
			if output == "json" {
				err = writeJSON(stdout, map[string]any{"files": files})
			} else {
				err = writeChecked(stdout, files)
			}
			if err != nil {
				return err
			}
			errs := 0
			for _, f := range files {
				for _, p := range f.Problems {
					if !p.Warning {
						errs++
					}
				}
			}
			if errs > 0 {
				return found{hinted{fmt.Errorf("%s", plural(errs, "error")), "each line says what to write"}}
			}
			return nil
		},
	}
	outputFlag(c, &output)
	c.Flags().DurationVar(&interval, "interval", 5*time.Second, "the adapter's --interval, for which windows and ages must be long enough")
	return c
}

// checked is what there is to say of a rule file.
type checked struct {
	File     string             `json:"file"`
	Metrics  []string           `json:"metrics"` // none if there is an error
	Problems []document.Problem `json:"problems"`

	rules []rules.Rule
}

func checkFiles(names []string, interval time.Duration) ([]checked, error) {
	if len(names) == 0 {
		list, err := loadRules("", interval)
		if err != nil {
			return nil, err
		}
		names, files := []string{}, []checked{{File: builtIn, rules: list, Problems: []document.Problem{}}}
		for _, r := range list {
			names = append(names, r.Metric)
		}
		files[0].Metrics = names
		return files, nil
	}
	files := []checked{}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, hinted{err, "name files that can be read"}
		}
		f := checked{File: name, Metrics: []string{}, Problems: []document.Problem{}}
		list, problems := rules.Check(name, data, interval)
		f.rules, f.Problems = list, append(f.Problems, problems...)
		for _, r := range list {
			f.Metrics = append(f.Metrics, r.Metric)
		}
		files = append(files, f)
	}
	return files, nil
}

func writeChecked(w io.Writer, files []checked) error {
	for _, f := range files {
		for _, p := range f.Problems {
			fmt.Fprintln(w, p)
		}
		if len(f.rules) == 0 {
			continue
		}
		fmt.Fprintf(w, "%s: %s\n", f.File, plural(len(f.rules), "metric"))
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "  METRIC\tUNIT\tITEM\tWINDOW\tMAXAGE\tMISSING\tHOLDFOR\tJOINFOR\tCOLLECT")
		for _, r := range f.rules {
			item := string(r.Per)
			if r.Per == rules.PerWorkload {
				item += ", " + string(r.Aggregate)
			}
			fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Metric, r.Unit, item, document.Short(r.Window), document.Short(r.MaxAge), r.Missing, document.Short(r.HoldFor), document.Short(r.JoinFor), r.Collect)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	return nil
}

func noArgs(hint string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			return hinted{fmt.Errorf("unexpected argument %q", args[0]), hint}
		}
		return nil
	}
}

// yamlFiles completes file names for the shell.
func yamlFiles(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
}

func outputFlag(c *cobra.Command, output *string) {
	c.Flags().StringVarP(output, "output", "o", "text", "text or json")
	complete(c, "output", "text", "json")
}

// complete names a flag's values to the shell.
func complete(c *cobra.Command, flag string, values ...string) {
	if err := c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // there is no such flag
	}
}

func checkOutput(output string) error {
	if output != "text" && output != "json" {
		return hinted{fmt.Errorf("--output is %q", output), "use text or json"}
	}
	return nil
}

func writeJSON(w io.Writer, value any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(value)
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

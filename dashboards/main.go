// Dashboards writes Capstan's Grafana dashboards beside this file, as JSON that Grafana 10 and newer imports.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/capstan-gpu/capstan/dashboards/board"
)

func main() {
	check := flag.Bool("check", false, "write nothing; fail when a file is not what it should be")
	dir := flag.String("dir", "dashboards", "folder of the JSON files")
	flag.Parse()
	if err := run(*dir, *check); err != nil {
		fmt.Fprintln(os.Stderr, "dashboards:", err)
		os.Exit(1)
	}
}

func run(dir string, check bool) error {
	for _, name := range board.Names() {
		want, err := board.JSON(name)
		if err != nil {
			return fmt.Errorf("build %s: %w", name, err)
		}
		file := filepath.Join(dir, name+".json")
		have, err := os.ReadFile(file)
		if err == nil && bytes.Equal(have, want) {
			continue
		}
		if check {
			return fmt.Errorf("%s is not up to date: make dashboards writes it", file)
		}
		if err := os.WriteFile(file, want, 0o644); err != nil {
			return err
		}
		fmt.Println("wrote", file)
	}
	return nil
}

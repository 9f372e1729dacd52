package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// releaseWait is how long release waits for the process to have closed the driver's device files: a reading that is under way ends first.
const releaseWait = 15 * time.Second

func releaseCommand() *cobra.Command {
	var pid int
	c := &cobra.Command{
		Use:   "release",
		Short: "Let the running exporter let go of the driver, so that it can be unloaded or a GPU handed to a virtual machine",
		Long: `Let the running exporter let go of the driver, and wait until it holds none of its device files.

Until resume nothing is known of the GPUs: they are absent from the page, and an HPA that scales on them stays where it is.
A driver of another version can only be taken up by a new process; then resume ends this one, and the kubelet starts the container anew.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tell(pid, syscall.SIGUSR1); err != nil {
				return err
			}
			for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
				held, err := deviceFiles(pid)
				switch {
				case err != nil:
					return err
				case len(held) == 0:
					fmt.Fprintf(cmd.OutOrStdout(), "process %d holds nothing of the driver\n", pid)
					return nil
				case time.Since(began) > releaseWait:
					return fmt.Errorf("process %d still holds %s after %s: its driver does not answer", pid, strings.Join(held, ", "), releaseWait)
				}
			}
		},
	}
	c.Flags().IntVar(&pid, "pid", 1, "the exporter's process, which is 1 in its container")
	return c
}

func resumeCommand() *cobra.Command {
	var pid int
	c := &cobra.Command{Use: "resume", Short: "Let the running exporter take the driver up again", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		if err := tell(pid, syscall.SIGUSR2); err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "process %d takes the driver up again; /readyz says whether it can\n", pid)
		return nil
	}}
	c.Flags().IntVar(&pid, "pid", 1, "the exporter's process, which is 1 in its container")
	return c
}

// tell sends a signal to an exporter, and to nothing else: the signal ends a process that does not expect it.
func tell(pid int, s syscall.Signal) error {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return fmt.Errorf("find process %d: %w (--pid names the running exporter)", pid, err)
	}
	command, _, _ := strings.Cut(string(name), "\x00")
	if filepath.Base(command) != "capstan-exporter" {
		return fmt.Errorf("process %d is %q, not capstan-exporter: --pid names the running exporter", pid, filepath.Base(command))
	}
	if err := syscall.Kill(pid, s); err != nil {
		return fmt.Errorf("signal process %d: %w", pid, err)
	}
	return nil
}

// deviceFiles lists the driver's device files that a process has open.
func deviceFiles(pid int) (held []string, err error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list the files of process %d: %w", pid, err)
	}
	for _, e := range entries {
		if target, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && strings.HasPrefix(target, "/dev/nvidia") {
			held = append(held, target)
		}
	}
	return held, nil
}

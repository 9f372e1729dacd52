// Images builds Capstan's container images from this checkout, without a Docker daemon, and writes or pushes them.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/spf13/cobra"

	"github.com/capstan-gpu/capstan/images/image"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "images",
		Short: "Build Capstan's container images without a Docker daemon",
		Example: `  go run ./images build --out dist/images
  go run ./images push registry.example.com/you`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	var out string
	build := &cobra.Command{
		Use:   "build [NAME…]",
		Short: "Write the images (all, or those named) as archives that containerd and Docker load",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(out, 0o755); err != nil {
				return err
			}
			return each(cmd.Context(), args, cmd.OutOrStdout(), func(s spec, i v1.Image) (string, error) {
				file := filepath.Join(out, s.name+".tar")
				return file, image.WriteTar(file, image.Ref(s.name), i)
			})
		},
	}
	build.Flags().StringVar(&out, "out", "dist/images", "folder for the archives")
	push := &cobra.Command{
		Use:   "push REGISTRY [NAME…]",
		Short: "Push the images to a registry, with the credentials that docker login left",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			registry := strings.TrimSuffix(args[0], "/")
			return each(cmd.Context(), args[1:], cmd.OutOrStdout(), func(s spec, i v1.Image) (string, error) {
				ref := registry + "/" + s.name + ":" + image.Version
				tag, err := name.NewTag(ref)
				if err != nil {
					return "", fmt.Errorf("registry %q: %w", registry, err)
				}
				return ref, remote.Write(tag, i, remote.WithContext(cmd.Context()), remote.WithAuthFromKeychain(authn.DefaultKeychain))
			})
		},
	}
	list := &cobra.Command{Use: "list", Short: "Name the images", Args: cobra.NoArgs, Run: func(cmd *cobra.Command, _ []string) {
		for _, s := range specs {
			fmt.Fprintln(cmd.OutOrStdout(), image.Ref(s.name))
		}
	}}
	weaken := &cobra.Command{Use: "weaken PROGRAM", Short: "Let a program that binds NVML's functions late start under LD_BIND_NOW, too", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := image.Weaken(args[0], "nvml")
			if err == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "%s: %d symbols\n", args[0], n)
			}
			return err
		}}
	root.AddCommand(build, push, list, weaken)
	return root
}

// each builds the named images, does with each what the caller wants, and prints a line of where it went, its digest and its size.
func each(ctx context.Context, names []string, w io.Writer, do func(spec, v1.Image) (string, error)) error {
	chosen, err := choose(names)
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "IMAGE\tDIGEST\tCOMPRESSED")
	for _, s := range chosen {
		i, err := s.build(ctx)
		if err != nil {
			return fmt.Errorf("build %s: %w", s.name, err)
		}
		where, err := do(s, i)
		if err != nil {
			return fmt.Errorf("image %s: %w", s.name, err)
		}
		digest, err := i.Digest()
		if err != nil {
			return err
		}
		size, err := image.CompressedSize(i)
		if err != nil {
			return err
		}
		fmt.Fprintf(table, "%s\t%s\t%.1f MB\n", where, digest, float64(size)/1e6)
	}
	return table.Flush()
}

func choose(names []string) (chosen []spec, err error) {
	if len(names) == 0 {
		return specs, nil
	}
next:
	for _, n := range names {
		var known []string
		for _, s := range specs {
			if s.name == n {
				chosen = append(chosen, s)
				continue next
			}
			known = append(known, s.name)
		}
		return nil, fmt.Errorf("image %q: there are %s", n, strings.Join(known, ", "))
	}
	return chosen, nil
}

package image

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// go-nvml#18, nvidia-container-toolkit#49: a program that binds late dies where the loader is told to bind at once. Weakened it starts,
// finds what is there when it is called, and symbols of another prefix stay as strict as they were.
func TestWeaken(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs a C compiler: apt-get install gcc")
	}
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	build := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
			t.Fatalf("cc %v: %v\n%s", args, err, out)
		}
	}
	library, program := filepath.Join(dir, "lib.so"), filepath.Join(dir, "program")
	build("-shared", "-fPIC", "-o", library, write("lib.c", "int late_there(void) { return 42; }\n"))
	build("-no-pie", "-rdynamic", "-Wl,-z,lazy", "-Wl,--unresolved-symbols=ignore-in-object-files", "-o", program, write("program.c", `
#include <dlfcn.h>
#include <stdio.h>
int late_there(void);
int late_missing(void);
int main(int argc, char **argv) {
	if (argc > 2) return late_missing();
	if (!dlopen(argv[1], RTLD_LAZY | RTLD_GLOBAL)) return 1;
	printf("%d\n", late_there());
}
`), "-ldl")
	run := func(env string) (string, error) {
		cmd := exec.Command(program, library)
		cmd.Env = append(os.Environ(), env)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := run("LD_BIND_NOW=1"); err == nil || !strings.Contains(out, "undefined symbol") {
		t.Fatalf("before: %v, %s; want an undefined symbol", err, out)
	}
	if n, err := Weaken(program, "other"); err != nil || n != 0 {
		t.Errorf("another prefix: %d, %v", n, err)
	}
	if n, err := Weaken(program, "late_"); err != nil || n != 2 {
		t.Fatalf("%d symbols, %v; want 2", n, err)
	}
	if out, err := run("X=1"); err != nil || out != "42\n" {
		t.Errorf("bound late: %v, %s; want 42", err, out)
	}
	if out, _ := run("LD_BIND_NOW=1"); strings.Contains(out, "undefined symbol") {
		t.Errorf("bound at once: %s; want it to start", out)
	}
}

// Package cgroup says which pod a process belongs to, by the name of its control group. It needs the host's process ids (hostPID), for
// the driver tells these, and refuses to guess: a process whose group does not name exactly one pod belongs to nobody.
package cgroup

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

// uidInName is a pod's UID in a group's name, by cgroupfs (…/pod8f6e9d0c-…/…) and by systemd (…-pod8f6e9d0c_….slice). A static pod has the
// hash of its manifest there, without dashes.
var uidInName = regexp.MustCompile(`(?:^|[/-])pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?:/|$)`)

// PodUID reads a pod's UID out of what /proc/PID/cgroup says, of version 1 or 2. It is "" when no line names a pod, or when lines name
// different ones.
func PodUID(text string) string {
	uid := ""
	for line := range strings.Lines(text) {
		_, path, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		if !ok {
			continue
		}
		_, path, _ = strings.Cut(path, ":") // hierarchy:controllers:path
		all := uidInName.FindAllStringSubmatch(path, -1)
		if len(all) == 0 {
			continue
		}
		this := strings.ReplaceAll(all[len(all)-1][1], "_", "-") // the innermost: a node may run in a pod itself
		if uid != "" && uid != this {
			return ""
		}
		uid = this
	}
	return uid
}

// Of is the UID of the pod that a process of the host belongs to, "" for none. A process that has ended is no error.
func Of(pid uint32) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	return PodUID(string(text))
}

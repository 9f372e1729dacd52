package main

import (
	"fmt"
	"net"
	"strings"

	"github.com/capstan-gpu/capstan/trainer/agent"
)

// firstPort is where the ports of the generations begin: each has its own, so that nobody of an older one can come in.
const (
	firstPort = 29500
	ports     = 512
)

// environment is what a command finds in a generation: the ring's own variables, and those of torch.distributed's env:// start with one
// process a worker.
func environment(job string, e agent.Entry) []string {
	hosts := make([]string, len(e.Members))
	for rank, m := range e.Members {
		host, _, err := net.SplitHostPort(m.Address)
		if err != nil {
			host = m.Address
		}
		hosts[rank] = host
	}
	master := ""
	if len(hosts) > 0 {
		master = hosts[0]
	}
	return []string{
		"RING_JOB=" + job,
		"RING_GENERATION=" + e.Generation.String(),
		fmt.Sprintf("RING_RANK=%d", e.Rank),
		fmt.Sprintf("RING_WORLD=%d", len(e.Members)),
		"RING_PEERS=" + strings.Join(hosts, ","),
		fmt.Sprintf("RING_RESUME_STEP=%d", e.Step),
		"MASTER_ADDR=" + master,
		fmt.Sprintf("MASTER_PORT=%d", firstPort+e.Generation.Count%ports),
		fmt.Sprintf("RANK=%d", e.Rank),
		fmt.Sprintf("WORLD_SIZE=%d", len(e.Members)),
		"LOCAL_RANK=0",
		"LOCAL_WORLD_SIZE=1",
	}
}

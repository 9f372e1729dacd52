package env

// pyTorch writes what torchrun gives each of its processes, so that init_process_group needs no argument, and libraries that ask whether
// torchrun started them hear yes. Ranks of a role are ranks of the world, for there is one role, of torchrun's usual name.
func (p Process) pyTorch(e *Environment) {
	e.set("MASTER_ADDR", p.host(0))
	e.set("MASTER_PORT", p.port())
	e.set("WORLD_SIZE", p.world())
	e.set("RANK", p.global())
	e.set("LOCAL_RANK", p.LocalRank)
	e.set("LOCAL_WORLD_SIZE", p.LocalProcesses)
	e.set("GROUP_RANK", p.Rank)
	e.set("GROUP_WORLD_SIZE", len(p.Members))
	e.set("ROLE_NAME", "default")
	e.set("ROLE_RANK", p.global())
	e.set("ROLE_WORLD_SIZE", p.world())
	e.set("TORCHELASTIC_RUN_ID", p.StatefulSet)
	e.set("TORCHELASTIC_RESTART_COUNT", p.Generation.Number())
	// Rank 0 serves the store at MASTER_PORT itself.
	e.set("TORCHELASTIC_USE_AGENT_STORE", "False")
	// torchrun's own: a file that only its agent reads, and how often it would start this process again, where here the job has one budget.
	e.Unset = append(e.Unset, "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS")
	e.Defaults = append(e.Defaults, "TORCH_NCCL_ASYNC_ERROR_HANDLING=1")
	if p.LocalProcesses > 1 {
		e.Defaults = append(e.Defaults, "OMP_NUM_THREADS=1")
	}
}

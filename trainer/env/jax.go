package env

// jax writes where JAX's processes meet. JAX itself reads JAX_COORDINATOR_ADDRESS and JAX_LOCAL_DEVICE_IDS only: the script hands the
// two numbers to jax.distributed.initialize(num_processes=…, process_id=…), else JAX takes the pod for one of an Indexed Job. The
// names without JAX_ are those of Kubeflow's JAXJob, for scripts that were written for it; the address there is without the port.
func (p Process) jax(e *Environment) {
	e.set("JAX_COORDINATOR_ADDRESS", address(p.host(0), p.port()))
	e.set("JAX_NUM_PROCESSES", p.world())
	e.set("JAX_PROCESS_ID", p.global())
	if p.LocalProcesses > 1 {
		e.set("JAX_LOCAL_DEVICE_IDS", p.LocalRank)
	}
	e.set("COORDINATOR_ADDRESS", p.host(0))
	e.set("COORDINATOR_PORT", p.port())
	e.set("NUM_PROCESSES", p.world())
	e.set("PROCESS_ID", p.global())
}

package gpu

import "fmt"

// code is an NVML return (nvmlReturn_t in nvml.h). Its text is ours: the library's own nvmlErrorString may be missing, and go-nvml
// calls it to print a return.
type code int

const (
	success         code = 0
	uninitialized   code = 1
	invalidArgument code = 2
	notSupported    code = 3
	noPermission    code = 4
	notFound        code = 6
	driverNotLoaded code = 9
	timeout         code = 10
	irqIssue        code = 11
	libraryNotFound code = 12
	functionMissing code = 13
	corruptInfoROM  code = 14
	gpuIsLost       code = 15
	resetRequired   code = 16
	operatingSystem code = 17
	versionMismatch code = 18
	noData          code = 21
	argumentVersion code = 25
	deprecated      code = 26
	gpuNotFound     code = 28
	unknown         code = 999
)

var codeNames = map[code]string{
	0: "SUCCESS", 1: "UNINITIALIZED", 2: "INVALID_ARGUMENT", 3: "NOT_SUPPORTED", 4: "NO_PERMISSION", 5: "ALREADY_INITIALIZED",
	6: "NOT_FOUND", 7: "INSUFFICIENT_SIZE", 8: "INSUFFICIENT_POWER", 9: "DRIVER_NOT_LOADED", 10: "TIMEOUT", 11: "IRQ_ISSUE",
	12: "LIBRARY_NOT_FOUND", 13: "FUNCTION_NOT_FOUND", 14: "CORRUPTED_INFOROM", 15: "GPU_IS_LOST", 16: "RESET_REQUIRED",
	17: "OPERATING_SYSTEM", 18: "LIB_RM_VERSION_MISMATCH", 19: "IN_USE", 20: "MEMORY", 21: "NO_DATA", 22: "VGPU_ECC_NOT_SUPPORTED",
	23: "INSUFFICIENT_RESOURCES", 24: "FREQ_NOT_SUPPORTED", 25: "ARGUMENT_VERSION_MISMATCH", 26: "DEPRECATED", 27: "NOT_READY",
	28: "GPU_NOT_FOUND", 29: "INVALID_STATE", 30: "RESET_TYPE_NOT_SUPPORTED", 999: "UNKNOWN",
}

// String is the name without its prefix NVML_ERROR_.
func (c code) String() string {
	if name, ok := codeNames[c]; ok {
		return name
	}
	return fmt.Sprintf("CODE_%d", int(c))
}

// verdict is what a return means for the one who called.
type verdict int

const (
	fine       verdict = iota
	absent             // this GPU or driver does not have it: no series, no error, asked again rarely
	empty              // nothing new, which is normal
	failed             // this call, this time
	lost               // this GPU: the others go on
	driverGone         // the driver that was opened is no more
)

func (c code) verdict() verdict {
	switch c {
	case success:
		return fine
	case notSupported, functionMissing, argumentVersion, deprecated:
		return absent
	case notFound, noData:
		return empty
	case gpuIsLost, resetRequired, irqIssue, corruptInfoROM:
		return lost
	case uninitialized, driverNotLoaded, versionMismatch, gpuNotFound:
		return driverGone
	}
	return failed
}

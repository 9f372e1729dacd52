package state

import (
	"fmt"
	"strings"
)

// Profile is a kind of GPU.
type Profile struct {
	Name, Model      string
	Memory, Reserved uint64   // bytes
	LimitWatts       uint32   // enforced power limit
	GPM              bool     // has performance counters
	Fields           bool     // answers nvmlDeviceGetFieldValues
	MIG              []string // profiles of its instances; none = MIG is off
}

// Profiles are the simulated kinds of GPUs, the default first. Figures are those of the products' data sheets.
var Profiles = []Profile{
	{Name: "h100", Model: "NVIDIA H100 80GB HBM3", Memory: 80 << 30, Reserved: 600 << 20, LimitWatts: 700, GPM: true, Fields: true},
	{Name: "h200", Model: "NVIDIA H200", Memory: 141 << 30, Reserved: 600 << 20, LimitWatts: 700, GPM: true, Fields: true},
	{Name: "a100", Model: "NVIDIA A100-SXM4-80GB", Memory: 80 << 30, Reserved: 500 << 20, LimitWatts: 400, Fields: true},
	{Name: "t4", Model: "Tesla T4", Memory: 16 << 30, Reserved: 400 << 20, LimitWatts: 70},
	{Name: "h100-mig", Model: "NVIDIA H100 80GB HBM3", Memory: 80 << 30, Reserved: 600 << 20, LimitWatts: 700, GPM: true, Fields: true, MIG: strings.Fields(strings.Repeat("1g.10gb ", 7))},
	{Name: "a100-mig", Model: "NVIDIA A100-SXM4-80GB", Memory: 80 << 30, Reserved: 500 << 20, LimitWatts: 400, Fields: true, MIG: []string{"3g.40gb", "2g.20gb", "1g.10gb"}},
}

// ProfileNamed finds a profile.
func ProfileNamed(name string) (Profile, error) {
	var names []string
	for _, p := range Profiles {
		if p.Name == name {
			return p, nil
		}
		names = append(names, p.Name)
	}
	return Profile{}, fmt.Errorf("profile %q: there are %s", name, strings.Join(names, ", "))
}

// What nvmlDeviceGetFieldValues can be asked for here, by the numbers of nvml.h.
const (
	FieldECCCorrected     = 3   // single-bit errors since the driver was loaded
	FieldECCUncorrected   = 4   // double-bit errors
	FieldThrottlePower    = 74  // ns
	FieldThrottleSync     = 76  // ns
	FieldMemoryTemp       = 82  // degrees Celsius
	FieldNVLinkTransmit   = 138 // KiB, over all links with scope 0xFFFFFFFF
	FieldNVLinkReceive    = 139
	FieldRemapCorrected   = 142
	FieldRemapUncorrected = 143
	FieldRemapPending     = 144
	FieldRemapFailure     = 145
	FieldPowerInstant     = 186 // mW
	FieldPCIeTransmit     = 197 // bytes
	FieldPCIeReceive      = 198
	FieldRecoveryAction   = 230
	FieldThrottleThermal  = 269 // ns, by software
	FieldThrottleHot      = 270 // ns, by hardware
	FieldThrottleBrake    = 271 // ns
)

// shape makes a fresh GPU one of the profile.
func (p Profile) shape(g *GPU) {
	copy(g.name[:], p.Model)
	g.MemoryTotal, g.MemoryReserved = p.Memory, p.Reserved
	g.PowerMilliwatts, g.Temperature, g.PowerLimit = p.LimitWatts*100, 32, p.LimitWatts*1000
	g.ClockMegahertz = [4]uint32{345, 345, 2619, 765}
	if p.GPM {
		g.GPM = 1
	}
	if p.Fields {
		for _, id := range []uint32{FieldECCCorrected, FieldECCUncorrected, FieldThrottlePower, FieldThrottleSync, FieldNVLinkTransmit, FieldNVLinkReceive,
			FieldPCIeTransmit, FieldPCIeReceive, FieldThrottleThermal, FieldThrottleHot, FieldThrottleBrake} {
			g.SetField(id, UnsignedLong64, 0, 0)
		}
		for _, id := range []uint32{FieldRemapCorrected, FieldRemapUncorrected, FieldRemapPending, FieldRemapFailure, FieldRecoveryAction} {
			g.SetField(id, UnsignedInt, 0, 0)
		}
		g.SetField(FieldPowerInstant, UnsignedInt, uint64(g.PowerMilliwatts), 0)
		g.SetField(FieldMemoryTemp, UnsignedInt, 36, 0)
	}
	if len(p.MIG) > 0 {
		g.SetInstances(p.MIG...)
	}
}

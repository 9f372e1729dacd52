package image

import (
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
)

// Weaken makes the undefined symbols of a program whose names begin with a prefix weak, in place, and says how many they were.
//
// go-nvml leaves NVML's functions undefined, to be bound when they are first called: no driver has all of them. A process that is told
// to bind at once (LD_BIND_NOW=1, which hardened machines set) therefore dies in the loader, before any code of ours could say why. An
// undefined symbol that is weak is no error for the loader. The linker has no switch for this; the loader's manual for the rest (ELF
// gABI, "Symbol Table": STB_WEAK).
func Weaken(path, prefix string) (count int, err error) {
	f, err := elf.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if f.Class != elf.ELFCLASS64 || f.Data != elf.ELFDATA2LSB {
		return 0, fmt.Errorf("%s is %s %s: want a 64-bit little-endian program", path, f.Class, f.Data)
	}
	section := f.Section(".dynsym")
	symbols, err := f.DynamicSymbols()
	if err != nil || section == nil {
		return 0, fmt.Errorf("%s has no dynamic symbols: %w", path, err)
	}
	out, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer out.Close()
	for i, s := range symbols {
		if s.Section != elf.SHN_UNDEF || elf.ST_BIND(s.Info) != elf.STB_GLOBAL || !strings.HasPrefix(s.Name, prefix) {
			continue
		}
		// DynamicSymbols leaves the null symbol out. st_info is the fifth byte of an Elf64_Sym of 24.
		at := int64(section.Offset) + int64(i+1)*int64(binary.Size(elf.Sym64{})) + 4
		if _, err := out.WriteAt([]byte{elf.ST_INFO(elf.STB_WEAK, elf.ST_TYPE(s.Info))}, at); err != nil {
			return count, err
		}
		count++
	}
	return count, out.Close()
}

package container

import (
	"reflect"
	"testing"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runtime-spec/specs-go"
)

func ptr[T any](v T) *T { return &v }

func TestMergeResources(t *testing.T) {
	device := specs.LinuxThrottleDevice{Rate: 7}
	device.Major, device.Minor = 8, 0
	for _, tc := range []struct {
		name string
		have cgroups.Resources
		set  specs.LinuxResources
		want cgroups.Resources
	}{
		{"nothing", cgroups.Resources{Memory: 5, CpuShares: 3}, specs.LinuxResources{}, cgroups.Resources{Memory: 5, CpuShares: 3}},
		{"memory", cgroups.Resources{Memory: 5, MemorySwap: 6},
			specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: ptr(int64(9))}},
			cgroups.Resources{Memory: 9, MemorySwap: 6}},
		{"no memory limit takes swap's along", cgroups.Resources{Memory: 5, MemorySwap: 6},
			specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: ptr(int64(-1))}},
			cgroups.Resources{Memory: -1}},
		{"quota keeps the period", cgroups.Resources{CpuPeriod: 100, CpuQuota: 10},
			specs.LinuxResources{CPU: &specs.LinuxCPU{Quota: ptr(int64(20))}},
			cgroups.Resources{CpuPeriod: 100, CpuQuota: 20}},
		{"period keeps the quota", cgroups.Resources{CpuPeriod: 100, CpuQuota: 10},
			specs.LinuxResources{CPU: &specs.LinuxCPU{Period: ptr(uint64(200))}},
			cgroups.Resources{CpuPeriod: 200, CpuQuota: 10}},
		{"cpu sets and pids are of one call", cgroups.Resources{CpusetCpus: "0", PidsLimit: ptr(int64(4))},
			specs.LinuxResources{CPU: &specs.LinuxCPU{Mems: "1"}, Pids: &specs.LinuxPids{Limit: ptr(int64(8))}},
			cgroups.Resources{CpusetMems: "1", PidsLimit: ptr(int64(8))}},
		{"throttle", cgroups.Resources{BlkioThrottleReadBpsDevice: []*cgroups.ThrottleDevice{cgroups.NewThrottleDevice(8, 0, 1), cgroups.NewThrottleDevice(8, 1, 2)}},
			specs.LinuxResources{BlockIO: &specs.LinuxBlockIO{ThrottleReadBpsDevice: []specs.LinuxThrottleDevice{device}}},
			cgroups.Resources{BlkioThrottleReadBpsDevice: []*cgroups.ThrottleDevice{cgroups.NewThrottleDevice(8, 1, 2), cgroups.NewThrottleDevice(8, 0, 7)}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := tc.have
			mergeResources(&got, &tc.set)
			if !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got  %+v\nwant %+v", got, tc.want)
			}
		})
	}
}

func TestIdleTakesSharesAway(t *testing.T) {
	got := cgroups.Resources{CpuShares: 512, CpuWeight: 20}
	mergeResources(&got, &specs.LinuxResources{CPU: &specs.LinuxCPU{Idle: ptr(int64(1))}})
	if got.CpuShares != 0 || got.CPUIdle == nil || *got.CPUIdle != 1 {
		t.Errorf("got %+v", got)
	}
}

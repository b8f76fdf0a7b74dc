module program

go 1.21
